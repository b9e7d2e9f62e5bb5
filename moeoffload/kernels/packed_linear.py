"""Linear layers whose weights stay packed in memory."""

from __future__ import annotations

import torch
from torch import nn

from moeoffload.formats.packed import PackedWeights
from moeoffload.kernels import calls
from moeoffload.kernels.dense import product
from moeoffload.kernels.packing import KernelMatrix, why_not_dtype, why_not_packed


class PackedLinear(nn.Module):
    """A linear layer without gradient that computes with the values of its packed weights.

    Attributes:
        weight: (1, out, in).
        bias: (out) of the compute dtype, or None.
        falls_back: why every call unpacks the weights for torch; None if the C kernels compute.
    """

    def __init__(self, weight: PackedWeights, bias: torch.Tensor | None = None) -> None:
        """Args: see the attributes. Raises ValueError for weights of more than one matrix."""
        super().__init__()
        n_matrices, self.out_features, self.in_features = weight.shape
        if n_matrices != 1:
            raise ValueError(f"packed weights {tuple(weight.shape)} are not one matrix")
        self.weight = weight
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.falls_back = why_not_packed((weight,))
        if weight.device.type != "cpu":
            self.falls_back = f"device {weight.device.type}"
        elif calls.library() is None:
            self.falls_back = "CPU kernels are not built"
        self._matrices: dict[torch.dtype, KernelMatrix] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., in) of a compute dtype to (..., out) of the same dtype."""
        no_kernel = why_not_dtype(x.dtype) or (self.weight.in_tiles and x.dtype is torch.float32)
        if self.falls_back or x.shape[-1] != self.in_features or no_kernel or not x.is_cpu:
            return nn.functional.linear(x, self.weight.unpack(x.dtype)[0], self.bias)
        matrix = self._matrices.get(x.dtype)
        if matrix is None:
            matrix = self._matrices[x.dtype] = KernelMatrix((self.weight,), x.dtype)
        return product(x, matrix.addresses, self.out_features, matrix.nbytes, self.bias)

    def extra_repr(self) -> str:
        """As `torch.nn.Linear`, with the format added."""
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.weight.format.name}"
