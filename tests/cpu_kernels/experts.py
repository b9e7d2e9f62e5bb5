"""Experts modules and inputs for the tests of kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from experts_modules import make_experts
from transformers.integrations import moe

from moeoffload.kernels import KernelInput
from moeoffload.kernels.dense import product_if_few
from moeoffload.native import Features, cpu_features

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}


@contextlib.contextmanager
def threads(n: int) -> Iterator[None]:
    """Computes with ``n`` threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def few_row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The C library's product, which takes these."""
    out = product_if_few(x, weight, bias)
    assert out is not None
    return out


def instruction_sets() -> list[Features]:
    """What CPUs from the plainest to this one can do."""
    sets, found = [Features(0)], Features(0)
    for step in (*(step for step in Features if step is not Features.MATRIX_UNIT), Features.MATRIX_UNIT):
        if step in cpu_features():
            found |= step
            sets.append(found)
    return sets


def gated_experts(
    n_experts: int, hidden: int, inter: int, dtype: torch.dtype, *, seed: int = 0, integers: bool = False
) -> Any:
    """Experts with silu(gate) * up; with ``integers`` every product and sum of a dot product is exact."""
    experts = make_experts("silu", n_experts, hidden, inter, dtype, seed=seed)
    experts.config._experts_implementation = "eager"
    if integers:
        generator = torch.Generator().manual_seed(seed)
        for parameter in experts.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    return experts


def routes(
    n_rows: int, top_k: int, n_experts: int, *, seed: int = 0, absent: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random distinct slots (n_rows, top_k), a share of them -1, and float32 weights."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.rand(n_rows, n_experts, generator=generator).topk(top_k).indices
    slots = slots.masked_fill(torch.rand(slots.shape, generator=generator) < absent, -1)
    return slots, torch.rand(slots.shape, generator=generator)


def random_rows(n_rows: int, hidden: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(n_rows, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_call(
    n_rows: int, hidden: int, dtype: torch.dtype, top_k: int, n_experts: int, *, seed: int = 0, absent: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, slots and weights of a call."""
    return random_rows(n_rows, hidden, dtype, seed=seed), *routes(n_rows, top_k, n_experts, seed=seed, absent=absent)


def call(layer: Any, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The layer's result in an ``out`` that held NaN before."""
    out = torch.full(rows.shape, torch.nan, dtype=torch.float32)
    layer(KernelInput(rows, slots, weights, out))
    return out


def transformers_result(experts: Any, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return moe.grouped_mm_experts_forward(experts, rows, slots, weights)
