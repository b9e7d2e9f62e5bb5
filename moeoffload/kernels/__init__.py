"""Kernels: a layer's experts are prepared once and called with rows, slots and weights.

Kernels of dense layers are in `fast_dense`, which an expert server does not import.
"""

from moeoffload.kernels.calls import SlotError
from moeoffload.kernels.grouped import grouped_experts
from moeoffload.kernels.layer import LayerKernels
from moeoffload.kernels.tiled import KernelInput
from moeoffload.kernels.workspace import KernelWorkspace

__all__ = ["KernelInput", "KernelWorkspace", "LayerKernels", "SlotError", "grouped_experts"]
