"""Kernels: a layer's experts are prepared once and called with rows, slots and weights; few-row linear layers."""

from moeoffload.kernels.base import ExpertKernel
from moeoffload.kernels.dense import accelerate_linears, few_row_linear
from moeoffload.kernels.grouped import GroupedKernel
from moeoffload.kernels.huge_pages import prefer_huge_pages
from moeoffload.kernels.layer import KernelChoice, LayerKernels, prepare_layer, warm_up
from moeoffload.kernels.local import local_experts, register_local_experts
from moeoffload.kernels.workspace import KernelWorkspace

__all__ = [
    "ExpertKernel",
    "GroupedKernel",
    "KernelChoice",
    "KernelWorkspace",
    "LayerKernels",
    "accelerate_linears",
    "few_row_linear",
    "local_experts",
    "prefer_huge_pages",
    "prepare_layer",
    "register_local_experts",
    "warm_up",
]
