"""Linear layers for few rows, plain or packed: they read weights at memory bandwidth, which torch's bfloat16 product
does not reach.

Results differ from torch's only in the order in which a dot product is summed: it is accumulated in float32, the bias
is added in float32, and the result is rounded once.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

import torch
from torch import nn

from moeoffload import native
from moeoffload.formats.packed import PackedWeights
from moeoffload.kernels import calls
from moeoffload.kernels.calls import COMPUTE_DTYPES, DTYPE_CODES, HALF_DTYPES, FusedCall, LinearCall
from moeoffload.kernels.packing import KernelMatrix, describe, why_not_dtype, why_not_packed
from moeoffload.kernels.threads import parallel_address, threads_for

MAX_ROWS: Final = 16
"""Calls of more rows go to torch."""


class ThreadBuffers(threading.local):
    """A thread's call structures, and its buffers for operands and unpacked weights; they grow as calls need them."""

    def __init__(self) -> None:
        self.linear, self.attention = LinearCall(), FusedCall()
        self.linear_address, self.attention_address = map(ctypes.addressof, (self.linear, self.attention))
        self.operands = torch.empty(0, dtype=torch.uint8)
        self.scratch = torch.empty(0, dtype=torch.uint8)
        self.between = torch.empty(0, dtype=torch.uint8)

    def room_for(self, n_bytes: int) -> int:
        """Returns the address of memory for what is computed between two steps of a call."""
        if self.between.numel() < n_bytes:
            self.between = torch.empty(n_bytes, dtype=torch.uint8)
        return self.between.data_ptr()

    def fill(self, call: LinearCall | FusedCall, row_bytes: int, n_rows: int, scratch_bytes: int) -> None:
        """Sets a call's buffers: for the operands of ``n_rows`` rows, and for scratch if it needs any."""
        if self.operands.numel() < n_rows * row_bytes:
            self.operands = torch.empty(max(n_rows, MAX_ROWS) * row_bytes, dtype=torch.uint8)
        if self.scratch.numel() < scratch_bytes:
            self.scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
        call.operands, call.scratch = self.operands.data_ptr(), self.scratch.data_ptr()


buffers: Final = ThreadBuffers()


def _product(
    x: torch.Tensor, addresses: tuple[int, int], n_out: int, weight_bytes: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns the C library's product of rows ``x`` (..., in) and a matrix (out, in), see `KernelMatrix.addresses`."""
    dtype, n_in = x.dtype, x.shape[-1]
    n_rows = x.numel() // n_in
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], n_out), dtype=dtype)
    if not n_rows:
        return out
    thread = buffers
    call, library = thread.linear, calls.library()
    call.dtype, call.features = DTYPE_CODES[dtype], native.cpu_features()
    call.weight, call.parts = addresses
    call.bias = 0 if bias is None else bias.data_ptr()
    call.rows, call.out = x.data_ptr(), out.data_ptr()
    call.n_in, call.n_out, call.n_rows = n_in, n_out, n_rows
    call.n_threads = n_threads = threads_for(weight_bytes)
    scratch_bytes = n_threads * library.moe_scratch_bytes(call.dtype, n_in) if call.parts else 0
    thread.fill(call, library.moe_operand_bytes(n_in), n_rows, scratch_bytes)
    call.parallel = parallel_address() if n_threads > 1 else 0
    library.moe_linear(thread.linear_address)
    return out


def product_if_few(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """As ``torch.nn.functional.linear``, for few rows on the CPU without gradient; returns None if torch must compute.

    ``x`` is (..., in) of the weight's dtype, ``weight`` (out, in) contiguous, ``bias`` (out) of the weight's dtype.
    """
    dtype = weight.dtype
    if (
        x.dtype != dtype
        or x.numel() > MAX_ROWS * weight.shape[1]
        or x.shape[-1] != weight.shape[1]
        or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        or dtype not in COMPUTE_DTYPES
        or not weight.is_cpu
        or not x.is_cpu
        or not weight.is_contiguous()
        or (bias is not None and (bias.dtype != dtype or not bias.is_contiguous()))
        or torch.compiler.is_compiling()
    ):
        return None
    return _product(x, (weight.data_ptr(), 0), weight.shape[0], weight.nbytes, bias)


class FewRowLinear(nn.Linear):
    """A `torch.nn.Linear` that computes with `product_if_few` where that applies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `torch.nn.Linear`."""
        # Read directly: attribute access on a module would search three dictionaries.
        weight = self._parameters.get("weight")
        out = product_if_few(x, weight, self._parameters["bias"]) if type(weight) is nn.Parameter else None
        return super().forward(x) if out is None else out


def accelerate_linears(model: nn.Module) -> None:
    """Lets a model's linear layers read their weights at memory bandwidth in calls of few rows.

    Changes the class of each `torch.nn.Linear` (not of its subclasses) on the CPU in bfloat16 or float16 to
    `FewRowLinear`; parameters, hooks and names stay. Calls with gradient, with more rows or under ``torch.compile`` are
    computed as before.
    """
    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        if (
            type(module) is nn.Linear
            and type(weight) is nn.Parameter
            and weight.is_cpu
            and weight.dtype in HALF_DTYPES
            and weight.is_contiguous()
        ):
            module.__class__ = FewRowLinear


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
        matrix = self.matrix(x.dtype)
        if matrix is None or x.shape[-1] != self.in_features or not x.is_cpu:
            return nn.functional.linear(x, self.weight.unpack(x.dtype)[0], self.bias)
        return _product(x, matrix.addresses, self.out_features, matrix.nbytes, self.bias)

    def matrix(self, dtype: torch.dtype) -> KernelMatrix | None:
        """Returns the weights for the C kernels; None if these do not compute in ``dtype``."""
        if self.falls_back or why_not_dtype(dtype) or (self.weight.in_tiles and dtype is torch.float32):
            return None
        matrix = self._matrices.get(dtype)
        if matrix is None:
            matrix = self._matrices[dtype] = KernelMatrix((self.weight,), dtype)
        return matrix

    def extra_repr(self) -> str:
        """As `torch.nn.Linear`, with the format added."""
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.weight.format.name}"


class PackedEmbedding(nn.Module):
    """An embedding without gradient whose rows are unpacked when they are looked up.

    Attributes:
        weight: (1, tokens, dim).
    """

    def __init__(self, weight: PackedWeights, dtype: torch.dtype) -> None:
        """``dtype`` is that of the looked-up rows; `fits` must allow it and the weight."""
        super().__init__()
        self.weight, self._dtype = weight, dtype
        self._matrix = describe(weight)

    @staticmethod
    def fits(weight: PackedWeights, dtype: torch.dtype) -> bool:
        """Whether the C library unpacks rows of such weights to ``dtype``."""
        is_in_rows = weight.device.type == "cpu" and not weight.in_tiles and calls.library() is not None
        return is_in_rows and why_not_packed((weight,)) is None and why_not_dtype(dtype) is None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps (...) token ids, int64 or int32, to (..., dim). Raises IndexError: there is no such token."""
        ids = ids.long().contiguous()
        out = torch.empty((*ids.shape, self.weight.n_in), dtype=self._dtype)
        matrix, code = ctypes.addressof(self._matrix), DTYPE_CODES[self._dtype]
        places = ids.data_ptr(), ids.numel(), out.data_ptr()
        wrong = calls.library().moe_packed_rows(matrix, code, native.cpu_features(), *places)
        if wrong >= 0:
            raise IndexError(f"token {ids.flatten()[wrong]} of {self.weight.shape[1]}")
        return out
