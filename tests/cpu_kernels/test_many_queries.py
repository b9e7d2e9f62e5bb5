"""Attention of many queries: as exact as torch's, whatever the layout and the mask, the same bits in any company."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from moeoffload import native
from moeoffload.kernels import attention
from moeoffload.kernels.attention import FEW_QUERIES, cpu_attention, takes_many
from moeoffload.native import Features, cpu_features

from .test_attention import a_cpu_without_matrix_unit, operands, truth  # noqa: F401 (a fixture)

pytestmark = pytest.mark.skipif(Features.BF16_DOT not in cpu_features(), reason="this CPU does not multiply bfloat16")
# Of cpu/attention.h.
BLOCK_ROWS, KEY_BLOCK = 48, 256
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# (heads, key heads, dim, value dim)
LAYOUTS = [(8, 2, 128, 128), (4, 4, 16, 16), (6, 2, 80, 72), (8, 1, 192, 128), (16, 1, 6, 5), (2, 2, 24, 40)]


def check(some: Operands, *mask: Any, **options: Any) -> torch.Tensor:
    """Probabilities and the result are rounded to bfloat16: so much may each be off, and no more."""
    query, key, value = some
    ours = cpu_attention(*some, *mask, **options)
    expected = truth(*some, *mask, **options)
    weight = truth(query, key, value.abs(), *mask, **options)
    assert ours.dtype == torch.bfloat16
    assert ours.shape == expected.shape
    assert ours.is_contiguous()
    assert ((ours - expected).abs() <= 2**-8 * (expected.abs() + weight) + 2**-17).all()
    return ours


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_result_is_as_exact_as_two_roundings_allow(layout: tuple[int, int, int, int]) -> None:
    for n_queries, n_keys in product((17, BLOCK_ROWS, BLOCK_ROWS + 7), (1, 2, 15, 90, KEY_BLOCK, KEY_BLOCK + 1, 600)):
        check(operands(layout, n_queries, n_keys, torch.bfloat16))
    check(operands(layout, 40, 70, torch.bfloat16, batch=2), scale=0.3)
    check(operands(layout, 40, 70, torch.bfloat16, batch=2), scale=-0.3)


def test_errors_are_no_larger_than_those_of_torch() -> None:
    some = operands((8, 2, 128, 128), 700, 700, torch.bfloat16)
    expected = truth(*some, is_causal=True)
    ours = cpu_attention(*some, is_causal=True)
    theirs = scaled_dot_product_attention(*some, is_causal=True, enable_gqa=True).transpose(1, 2)
    ours_off, theirs_off = ((each - expected).square().mean().sqrt() for each in (ours, theirs))
    assert ours_off < 1.1 * theirs_off


@pytest.mark.parametrize("layout", [(8, 2, 64, 64), (4, 4, 24, 16)], ids=str)
def test_masks_of_every_kind(layout: tuple[int, int, int, int]) -> None:
    batch, n_queries, n_keys = 2, 61, 530
    some = operands(layout, n_queries, n_keys, torch.bfloat16, batch)
    for shape in ((1, 1, n_queries, n_keys), (batch, 1, 1, n_keys), (batch, layout[0], n_queries, n_keys)):
        seen = torch.rand(shape) < 0.5
        check(some, seen)
        check(some, seen.transpose(2, 3).contiguous().transpose(2, 3))
        for kind in (torch.bfloat16, torch.float32):
            check(some, torch.randn(shape).to(kind))
            check(some, torch.zeros(shape, dtype=kind).masked_fill(~seen, torch.finfo(kind).min))
    check(some, torch.rand(n_queries, n_keys) < 0.5)
    for window in (10_000, 300, 40):
        places = torch.arange(n_keys - n_queries, n_keys)[:, None] - torch.arange(n_keys)
        check(some, (places >= 0) & (places < window))
    check(operands(layout, 600, 600, torch.bfloat16, batch), is_causal=True)
    check(operands(layout, 40, 17, torch.bfloat16), is_causal=True)


def test_bits_do_not_depend_on_how_a_prompt_is_cut() -> None:
    query, key, value = operands((8, 2, 64, 64), 900, 900, torch.bfloat16)
    whole = cpu_attention(query, key, value, is_causal=True)
    seen = torch.ones(900, 900, dtype=torch.bool).tril()
    assert torch.equal(cpu_attention(query, key, value, seen), whole)
    for first, end in ((0, 17), (17, 300), (300, 349), (349, 900)):
        part = cpu_attention(query[:, :, first:end], key[:, :, :end], value[:, :, :end], seen[first:end, :end])
        assert torch.equal(part, whole[:, first:end])


def test_torch_computes_many_queries_where_the_cpu_has_a_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cpu_features", lambda: Features.BF16_DOT | Features.MATRIX_UNIT)
    assert not takes_many(torch.bfloat16)
    assert not attention.fits(*operands((4, 2, 16, 16), FEW_QUERIES + 1, 30, torch.bfloat16), None)
    monkeypatch.setattr(native, "cpu_features", lambda: Features.AVX512)
    assert not takes_many(torch.bfloat16)
    monkeypatch.setattr(native, "cpu_features", lambda: Features.BF16_DOT)
    assert takes_many(torch.bfloat16)
    assert not takes_many(torch.float32)
