"""Expert kernels: one file each, behind one small interface."""

from moeoffload.kernels.base import ExpertKernel
from moeoffload.kernels.grouped import GroupedKernel

__all__ = ["ExpertKernel", "GroupedKernel"]
