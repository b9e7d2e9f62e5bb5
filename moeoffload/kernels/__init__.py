"""Kernels: a layer's experts are prepared once and called with rows, slots and weights; dense layers at few rows."""

from moeoffload.kernels.attention import cpu_attention
from moeoffload.kernels.calls import COMPUTE_DTYPES
from moeoffload.kernels.dense import few_row_linear
from moeoffload.kernels.fast_dense import accelerate_dense
from moeoffload.kernels.grouped import GroupedKernel
from moeoffload.kernels.huge_pages import prefer_huge_pages
from moeoffload.kernels.layer import KernelChoice, LayerKernels, prepare_layer
from moeoffload.kernels.local import local_experts, register_local_experts
from moeoffload.kernels.packed_linear import PackedLinear
from moeoffload.kernels.workspace import KernelWorkspace

__all__ = [
    "COMPUTE_DTYPES",
    "GroupedKernel",
    "KernelChoice",
    "KernelWorkspace",
    "LayerKernels",
    "PackedLinear",
    "accelerate_dense",
    "cpu_attention",
    "few_row_linear",
    "local_experts",
    "prefer_huge_pages",
    "prepare_layer",
    "register_local_experts",
]
