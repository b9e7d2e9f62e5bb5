"""Formats of low-bit weights: in memory (`packed`), and in files (one module for each vendor's format)."""

from moeoffload.formats.packed import Codes, Offsets, PackedFormat, PackedWeights, Scales

__all__ = ["Codes", "Offsets", "PackedFormat", "PackedWeights", "Scales"]
