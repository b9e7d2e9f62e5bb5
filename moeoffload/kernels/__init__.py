"""Expert kernels: a layer is prepared once and called with rows, slots and weights."""

from moeoffload.kernels.base import ExpertKernel
from moeoffload.kernels.grouped import GroupedKernel
from moeoffload.kernels.layer import KernelChoice, LayerKernels, prepare_layer, warm_up
from moeoffload.kernels.workspace import KernelWorkspace

__all__ = [
    "ExpertKernel",
    "GroupedKernel",
    "KernelChoice",
    "KernelWorkspace",
    "LayerKernels",
    "prepare_layer",
    "warm_up",
]
