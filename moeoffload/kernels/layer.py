"""Prepares one layer's experts once and computes them many times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from moeoffload.config import Kernel
from moeoffload.kernels.calls import SlotError
from moeoffload.kernels.grouped import grouped_experts
from moeoffload.kernels.packing import dtype_of, first_tensor, hidden_of, up_weight, why_not
from moeoffload.kernels.tiled import KernelInput, TiledExperts, contiguous
from moeoffload.kernels.triton_experts import TritonExperts, few_rows_kernel
from moeoffload.kernels.workspace import KernelWorkspace


class LayerKernels:
    """Computes the weighted sum of one layer's routed experts.

    Attributes:
        n_experts: experts held; slots are -1 to n_experts - 1.
        hidden: elements of a row.
        dtype: the compute dtype.
        falls_back: why this layer needs the grouped kernel; None if the tiled one computes it.
        weight_error: relative error of the weights against the stored ones; None if they were not packed here.
        is_batch_invariant: whether a row's bits do not depend on the other rows of a call.
    """

    def __init__(self, experts: nn.Module, workspace: KernelWorkspace | None = None, kernel: Kernel = "auto") -> None:
        """Reads the module's layout and the addresses of its weights.

        Args:
            experts: the model's own experts class, on its device, with final weights: addresses are kept, so parameters
                may be changed in place but not replaced. Weights stored (in, out) are transposed in place; the
                parameters' shapes and values stay.
            workspace: shared by the layers that one thread calls; a new one by default.
            kernel: ``auto`` takes the tiled kernel where possible, and on a GPU the Triton kernel up to its
                ``most_rows``; ``grouped`` gives the bits of transformers' ``grouped_mm``.
        """
        module: Any = experts
        self._experts = module
        self._workspace = workspace or KernelWorkspace()
        self._triton = few_rows_kernel(experts) if kernel == "auto" else None
        self.falls_back = "chosen" if kernel == "grouped" else why_not(experts)
        if kernel == "tiled" and self.falls_back:
            raise ValueError(f"these experts cannot be computed by the tiled kernel: {self.falls_back}")
        self.weight_error: float | None = getattr(experts, "weight_error", None)
        self.n_experts = first_tensor(up_weight(module)).shape[0]
        self.dtype = dtype_of(experts)
        self.hidden = hidden_of(experts)
        if self.falls_back is None:
            self._tiled = TiledExperts(experts)
        is_tiled = self.falls_back is None and self._triton is None
        self.is_batch_invariant = is_tiled and self._tiled.is_batch_invariant

    def kernel_for(self, n_rows: int) -> str:
        """Returns the name of the kernel that serves a call of ``n_rows`` rows."""
        if self._triton_for(n_rows) is not None:
            return "triton"
        return "grouped" if self.falls_back else "tiled"

    def compile(self, top_k: int) -> None:
        """Compiles the Triton programs of all calls, if there are any; other calls may run meanwhile."""
        if self._triton is not None:
            self._triton.warm_up(top_k)

    def reserve(self, max_rows: int, top_k: int) -> None:
        """Makes the workspace large enough for calls of up to ``max_rows`` rows, and compiles Triton programs."""
        if self.falls_back is None:
            self._workspace.reserve(self._tiled.shape, max_rows, top_k)
        self.compile(top_k)

    def __call__(self, call: KernelInput, workspace: KernelWorkspace | None = None) -> None:
        """Runs rows through their experts.

        ``workspace`` is used instead of the layer's own, for calls from another thread.

        Raises:
            SlotError: a slot below -1 or above the last expert; ``call.out`` is not written. On a GPU, where a check
                would wait for the device, such a slot adds nothing.
            ValueError: shapes or dtypes do not match.
        """
        self._check(call)
        if not call.slots.numel():
            call.out.zero_()
        elif (triton := self._triton_for(len(call.slots))) is not None:
            triton(*call)
        elif self.falls_back:
            rows, slots, weights, out = call
            self._check_slots(slots)
            out.copy_(grouped_experts(self._experts, rows, slots, weights, may_wait=slots.is_cpu))
        else:
            self._tiled.run(contiguous(call), workspace or self._workspace)

    def in_slices(self, call: KernelInput, workspace: KernelWorkspace | None = None) -> Iterator[None]:
        """Computes a call with the same bits, but in slices of some milliseconds.

        A slice computes the routes of some experts, so that weights are read once; the last slices write ``call.out``.
        Between two slices, calls of this and of other layers may run in another workspace; the tensors must not be
        touched before the end. The grouped kernel and those of a GPU cannot be sliced and make one slice.
        Raises SlotError, ValueError: see `__call__`.
        """
        if self.falls_back or self._triton_for(len(call.slots)) is not None or not call.slots.numel():
            self(call)
            yield
        else:
            self._check(call)
            yield from self._tiled.in_slices(contiguous(call), workspace or self._workspace)

    def _triton_for(self, n_rows: int) -> TritonExperts | None:
        triton = self._triton
        return triton if triton is not None and n_rows <= triton.most_rows else None

    def _check_slots(self, slots: torch.Tensor) -> None:
        if slots.is_cpu and slots.numel() and (slots.min() < -1 or slots.max() >= self.n_experts):
            raise SlotError(self.n_experts)

    def _check(self, call: KernelInput) -> None:
        rows, slots, weights, out = call
        shape = (slots.shape[0], self.hidden)
        if rows.shape != shape or out.shape != shape or weights.shape != slots.shape:
            raise ValueError(
                f"rows {tuple(rows.shape)}, slots {tuple(slots.shape)}, weights {tuple(weights.shape)}, "
                f"out {tuple(out.shape)}: expected (n, {self.hidden}), (n, top_k), (n, top_k), (n, {self.hidden})"
            )
        dtypes = (rows.dtype, slots.dtype, weights.dtype, out.dtype)
        if dtypes not in (
            (self.dtype, torch.int64, torch.float32, torch.float32),
            (self.dtype, torch.int64, self.dtype, torch.float32),
        ):
            raise ValueError(f"dtypes of rows, slots, weights, out are {dtypes}; the compute dtype is {self.dtype}")
        if not out.is_contiguous():
            raise ValueError("out is not contiguous")
