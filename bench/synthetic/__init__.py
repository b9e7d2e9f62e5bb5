"""Random-weight checkpoints: tiny ones of many families for tests, real geometries for benchmarks."""

from synthetic.configs import GEOMETRIES, TINY_FAMILIES, geometry_config, tiny_config
from synthetic.quantised import Quantised
from synthetic.writer import Layout, write_checkpoint, write_tiny

__all__ = [
    "GEOMETRIES",
    "TINY_FAMILIES",
    "Layout",
    "Quantised",
    "geometry_config",
    "tiny_config",
    "write_checkpoint",
    "write_tiny",
]
