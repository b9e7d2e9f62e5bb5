"""Attention of many queries: as exact as torch's, whatever the layout and the mask, the same bits in any company."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from moeoffload import native
from moeoffload.kernels import attention, cpu_attention
from moeoffload.kernels.attention import FEW_QUERIES, takes_many
from moeoffload.native import Features, cpu_features

from .test_attention import operands, truth

pytestmark = pytest.mark.skipif(Features.BF16_DOT not in cpu_features(), reason="this CPU does not multiply bfloat16")
# Of cpu/attention.h.
BLOCK_ROWS, KEY_BLOCK = 48, 256
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# (heads, key heads, dim, value dim)
LAYOUTS = [(8, 2, 128, 128), (4, 4, 16, 16), (6, 2, 80, 72), (8, 1, 192, 128), (16, 1, 6, 5), (2, 2, 24, 40)]


@pytest.fixture(autouse=True)
def _a_cpu_without_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one, torch computes many queries."""
    without = cpu_features() & ~Features.MATRIX_UNIT
    monkeypatch.setattr(native, "cpu_features", lambda: without)
    assert takes_many(torch.bfloat16)


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


def test_a_query_that_sees_no_key_gives_zeros() -> None:
    some = operands((4, 2, 16, 16), 20, 600, torch.bfloat16)
    seen = torch.ones(20, 600, dtype=torch.bool)
    seen[1] = False
    seen[2, :290] = False
    ours = check(some, seen)
    assert not ours[:, 1].any()
    assert ours[:, 2].any()


def test_keys_and_values_may_be_views() -> None:
    heads, key_heads, dim = 8, 2, 32
    query = torch.randn(2, 30, heads, dim).bfloat16().transpose(1, 2)
    whole = torch.randn(2, key_heads, 500, 2 * dim).bfloat16()
    for keys, values in (
        (whole[:, :, 100:400, :dim], whole[:, :, 100:400, dim:]),
        (whole[..., :dim].transpose(1, 2).contiguous().transpose(1, 2), whole[..., dim:]),
        (whole[:1, :1, :, :dim].expand(2, key_heads, 500, dim), whole[:, :, :, dim:]),
        (whole[:, :, ::3, :dim], whole[:, :, ::3, 1 : dim + 1]),
    ):
        ours = check((query, keys, values))
        assert torch.equal(ours, cpu_attention(query.contiguous(), keys.contiguous(), values.contiguous()))


def test_bits_do_not_depend_on_how_a_prompt_is_cut() -> None:
    query, key, value = operands((8, 2, 64, 64), 900, 900, torch.bfloat16)
    whole = cpu_attention(query, key, value, is_causal=True)
    seen = torch.ones(900, 900, dtype=torch.bool).tril()
    assert torch.equal(cpu_attention(query, key, value, seen), whole)
    for first, end in ((0, 17), (17, 300), (300, 349), (349, 900)):
        part = cpu_attention(query[:, :, first:end], key[:, :, :end], value[:, :, :end], seen[first:end, :end])
        assert torch.equal(part, whole[:, first:end])


def test_bits_do_not_depend_on_other_heads_or_threads() -> None:
    query, key, value = operands((12, 4, 40, 48), 333, 700, torch.bfloat16, batch=2)
    mask = torch.rand(2, 1, 333, 700) < 0.7
    together = cpu_attention(query, key, value, mask)
    for head in range(4):
        one = cpu_attention(
            query[:1, 3 * head : 3 * head + 1], key[:1, head : head + 1], value[:1, head : head + 1], mask[:1]
        )
        assert torch.equal(one[0, :, 0], together[0, :, 3 * head])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert all(torch.equal(cpu_attention(query, key, value, mask), together) for _ in range(20))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_non_finite_values_are_not_hidden(where: int, bad: float) -> None:
    some = operands((2, 2, 16, 16), FEW_QUERIES + 4, 300, torch.bfloat16)
    some[where][0, 1, 1, 3] = bad
    out = cpu_attention(*some)
    assert out[:, :, 0].isfinite().all()
    assert not out[:, :, 1].isfinite().all()


def test_large_products_do_not_overflow() -> None:
    query, key, value = operands((2, 1, 64, 64), 20, 400, torch.bfloat16)
    check((query * 30, key * 30, value))


def test_torch_computes_many_queries_where_the_cpu_has_a_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cpu_features", lambda: Features.BF16_DOT | Features.MATRIX_UNIT)
    assert not takes_many(torch.bfloat16)
    assert not attention.fits(*operands((4, 2, 16, 16), FEW_QUERIES + 1, 30, torch.bfloat16), None)
    monkeypatch.setattr(native, "cpu_features", lambda: Features.AVX512)
    assert not takes_many(torch.bfloat16)
    monkeypatch.setattr(native, "cpu_features", lambda: Features.BF16_DOT)
    assert takes_many(torch.bfloat16)
    assert not takes_many(torch.float32)
