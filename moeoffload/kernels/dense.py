"""Linear layers at few rows: read their weights at memory speed, which torch's bfloat16 product does not.

A result differs from torch's in the order in which a dot product is summed, nothing else: it is accumulated in float32,
the bias is added in float32, and rounded once.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from moeoffload.kernels import words
from moeoffload.kernels.huge_pages import move_to_huge_pages
from moeoffload.kernels.matrix_phases import multiplies_by_matrix
from moeoffload.kernels.phases import plan_words
from moeoffload.kernels.program import COMPUTE_DTYPES, ITEM_GROUPS, c_function, linear_program, row_dtype, threads_for
from moeoffload.kernels.tile import WEIGHT_ROWS

MAX_ROWS: Final = 16
"""Calls of more rows go to torch."""


class _Thread(threading.local):
    """A thread's call block, plan, and rows that were converted or packed."""

    def __init__(self) -> None:
        self.call = (ctypes.c_int64 * words.CALL_WORDS)()
        self.address = ctypes.addressof(self.call)
        self.plan = torch.empty(plan_words.py_func(1, MAX_ROWS), dtype=torch.int32)
        self.operands = torch.empty(0, dtype=torch.float32)
        self.packed = torch.empty(0, dtype=torch.bfloat16)
        self.call[words.PLAN] = self.plan.data_ptr()


_thread = _Thread()


def few_row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear`` for few rows on the CPU, without gradient.

    Args:
        x: (..., in) of the weight's dtype, at most MAX_ROWS rows.
        weight: (out, in) bfloat16, float16 or float32, contiguous, at least four rows.
        bias: (out) of the weight's dtype.

    Returns:
        (..., out) of the weight's dtype.
    """
    n_out, n_in = weight.shape
    if x.numel() > MAX_ROWS * n_in or n_out < WEIGHT_ROWS or x.shape[-1] != n_in or x.dtype != weight.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}")
    return _product(x, weight, bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    n_out, n_in = weight.shape
    n_rows = x.numel() // n_in
    dtype = weight.dtype
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], n_out), dtype=dtype)
    if not n_rows:
        return out
    thread = _thread
    call = thread.call
    call[words.WEIGHT] = weight.data_ptr()
    call[words.BIAS] = bias.data_ptr() if bias is not None else 0
    call[words.N_IN] = n_in
    call[words.N_OUT] = n_out
    call[words.N_ROWS] = n_rows
    call[words.ROWS] = call[words.OPERANDS] = x.data_ptr()
    call[words.OUT] = out.data_ptr()
    if row_dtype(dtype) != dtype:
        if thread.operands.numel() < n_rows * n_in:
            thread.operands = torch.empty(MAX_ROWS * n_in, dtype=torch.float32)
        call[words.OPERANDS] = thread.operands.data_ptr()
    elif dtype == torch.bfloat16 and multiplies_by_matrix(n_in, n_out):
        if thread.packed.numel() < n_rows * n_in:
            thread.packed = torch.empty(MAX_ROWS * n_in, dtype=torch.bfloat16)
        call[words.PACKED] = thread.packed.data_ptr()
    else:
        call[words.PACKED] = 0
    program = linear_program(dtype)
    n_threads = threads_for(n_out * n_in * dtype.itemsize)
    call[words.PHASES] = words.PLAN_PHASE | words.UP_PHASE
    if n_threads == 1:
        call[words.ITEM_GROUPS] = n_out
        program.run(thread.address)
    else:
        call[words.ITEM_GROUPS] = ITEM_GROUPS
        call[words.YIELD] = c_function("sched_yield")
        call[words.PHASES] = words.PLAN_PHASE
        program.run(thread.address)
        call[words.PHASES] = words.UP_PHASE
        program.run_threaded(thread.address, n_threads)
    return out


def product_if_few(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """`few_row_linear` where it applies; None where torch is to compute. ``weight`` is (out, in), as a parameter."""
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
        or weight.shape[0] < WEIGHT_ROWS
        or (bias is not None and (bias.dtype != dtype or not bias.is_contiguous()))
        or torch.compiler.is_compiling()
    ):
        return None
    return _product(x, weight, bias)


class FewRowLinear(nn.Linear):
    """A linear layer that calls `few_row_linear` where it can, and is `torch.nn.Linear` in everything else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `torch.nn.Linear`."""
        # Attributes of modules are looked up in three places; this is the one.
        weight = self._parameters.get("weight")
        out = product_if_few(x, weight, self._parameters["bias"]) if type(weight) is nn.Parameter else None
        return super().forward(x) if out is None else out


def _fits(module: nn.Linear) -> bool:
    weight: Any = module.weight
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in COMPUTE_DTYPES
        and weight.is_contiguous()
        and weight.shape[0] >= WEIGHT_ROWS
    )


def accelerate_linears(model: nn.Module) -> Callable[[], None]:
    """Lets the model's linear layers read their weights at memory speed in calls of few rows.

    Changes the class of each `torch.nn.Linear` on the CPU in bfloat16 or float16 (not of its subclasses) to
    `FewRowLinear`: parameters, hooks and names stay; the weights move to huge pages. Calls with gradient, of more rows
    or under ``torch.compile`` are computed as before.

    Returns:
        a function that changes them back; weights stay where they are.
    """
    chosen = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and _fits(module) and module.weight.dtype != torch.float32
    ]
    for dtype in {module.weight.dtype for module in chosen}:
        linear_program(dtype)
    for module in chosen:
        module.__class__ = FewRowLinear
    move_to_huge_pages(each for module in chosen for each in module.parameters(recurse=False))

    def restore() -> None:
        for module in chosen:
            module.__class__ = nn.Linear

    return restore
