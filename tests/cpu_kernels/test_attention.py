"""Attention of few and many queries: as exact as its roundings allow, whatever the layout, the mask and the batch."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from moeoffload import native
from moeoffload.kernels.attention import FEW_QUERIES, Pages, cpu_attention
from moeoffload.native import Features, cpu_features

from .experts import DTYPES, EPSILON, instruction_sets, threads

# (heads, key heads, dim, value dim)
LAYOUTS = [
    (32, 4, 128, 128),
    (4, 4, 16, 16),
    (6, 2, 80, 72),
    (8, 1, 192, 128),
    (16, 1, 6, 5),
    (2, 2, 24, 40),
    (6, 2, 32, 120),
    (2, 2, 24, 24),
]
# Many queries of bfloat16 are computed otherwise, where the CPU multiplies pairs of them: a dtype, a number of queries.
TAKES_MANY = Features.BF16_DOT in cpu_features()
KINDS = [*((dtype, 7) for dtype in DTYPES), *([(torch.bfloat16, 333)] if TAKES_MANY else [])]
needs_many = pytest.mark.skipif(not TAKES_MANY, reason="this CPU does not multiply bfloat16")
BLOCK_ROWS, KEY_BLOCK = 48, 256  # of cpu/attention.h


@pytest.fixture(autouse=True)
def a_cpu_without_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one, torch computes many queries."""
    without = cpu_features() & ~Features.MATRIX_UNIT
    monkeypatch.setattr(native, "cpu_features", lambda: without)


def truth(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """The same in float64."""
    group = query.shape[1] // key.shape[1]
    key, value = (each.double().repeat_interleave(group, 1) for each in (key, value))
    scores = query.double() @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1).nan_to_num() @ value).transpose(1, 2)


def operands(
    layout: tuple[int, int, int, int], n_queries: int, n_keys: int, dtype: torch.dtype, batch: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random query, key, value."""
    heads, key_heads, dim, value_dim = layout
    random = torch.Generator().manual_seed(n_keys + n_queries)
    shapes = ((heads, n_queries, dim), (key_heads, n_keys, dim), (key_heads, n_keys, value_dim))
    query, key, value = (torch.randn(batch, *shape, generator=random).to(dtype) for shape in shapes)
    return query, key, value


def check(operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *mask: Any, **options: Any) -> torch.Tensor:
    """The result is rounded once; so are the probabilities where the CPU multiplies them in bfloat16."""
    ours = cpu_attention(*operands, *mask, **options)
    expected = truth(*operands, *mask, **options)
    query, key, value = operands
    assert ours.dtype == query.dtype
    assert ours.shape == (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    assert ours.is_contiguous()
    rounded = expected.abs()
    if query.dtype == torch.bfloat16 and Features.BF16_DOT in native.cpu_features():
        rounded = rounded + truth(query, key, value.abs(), *mask, **options)
    assert ((ours - expected).abs() <= EPSILON[query.dtype] * rounded + 2**-17).all()
    return ours


@pytest.mark.parametrize("layout", [*LAYOUTS, (16, 1, 7, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_of_few_queries(dtype: torch.dtype, layout: tuple[int, int, int, int]) -> None:
    for n_queries, n_keys in product((1, 2, FEW_QUERIES), (1, 2, 3, 5, 16, 90, 257, 600)):
        check(operands(layout, n_queries, n_keys, dtype))
    check(operands(layout, 3, 40, dtype, batch=2), scale=0.3)


@needs_many
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_results_of_many_queries(layout: tuple[int, int, int, int]) -> None:
    for n_queries, n_keys in product((17, BLOCK_ROWS, BLOCK_ROWS + 7), (1, 2, 15, 90, KEY_BLOCK, KEY_BLOCK + 1, 600)):
        check(operands(layout, n_queries, n_keys, torch.bfloat16))
    check(operands(layout, 40, 70, torch.bfloat16, batch=2), scale=0.3)
    check(operands(layout, 40, 70, torch.bfloat16, batch=2), scale=-0.3)


@pytest.mark.parametrize("features", [each for each in instruction_sets() if Features.BF16_DOT not in each], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpus_with_fewer_instructions(dtype: torch.dtype, features: Features, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cpu_features", lambda: features)
    for layout, n_queries in product(LAYOUTS, (1, 5)):
        some = operands(layout, n_queries, 300, dtype)
        check(some, torch.rand(n_queries, 300) < 0.5)
        check(some, torch.randn(n_queries, 300))


@pytest.mark.parametrize(
    ("dtype", "n_queries", "n_keys"),
    [*((dtype, 5, 300) for dtype in DTYPES), pytest.param(torch.bfloat16, 61, 530, marks=needs_many)],
    ids=str,
)
@pytest.mark.parametrize("layout", [(8, 2, 64, 64), (4, 4, 24, 16)], ids=str)
def test_masks_of_every_kind(
    layout: tuple[int, int, int, int], dtype: torch.dtype, n_queries: int, n_keys: int
) -> None:
    batch = 2
    some = operands(layout, n_queries, n_keys, dtype, batch)
    for shape in ((1, 1, n_queries, n_keys), (batch, 1, 1, n_keys), (batch, layout[0], n_queries, n_keys)):
        seen = torch.rand(shape) < 0.5
        check(some, seen)
        check(some, seen.transpose(2, 3).contiguous().transpose(2, 3))
        for kind in (dtype, torch.float32):
            check(some, torch.randn(shape).to(kind))
            check(some, torch.zeros(shape, dtype=kind).masked_fill(~seen, torch.finfo(kind).min))
    check(some, torch.rand(n_queries, n_keys) < 0.5)
    for window in (10_000, 300, 40):
        places = torch.arange(n_keys - n_queries, n_keys)[:, None] - torch.arange(n_keys)
        check(some, (places >= 0) & (places < window))
    long = n_queries if n_queries <= FEW_QUERIES else 600
    check(operands(layout, long, long, dtype, batch), is_causal=True)
    check(operands(layout, min(n_queries, 40), min(n_queries - 2, 17), dtype), is_causal=True)


@pytest.mark.parametrize("n_queries", [3, pytest.param(333, marks=needs_many)])
def test_a_query_that_sees_no_key_gives_zeros_as_in_torch(n_queries: int) -> None:
    some = operands((4, 2, 16, 16), n_queries, 300, torch.bfloat16)
    seen = torch.ones(n_queries, 300, dtype=torch.bool)
    seen[1] = False
    # Nothing in the first block of keys, something in the second.
    seen[2, :290] = False
    ours = cpu_attention(*some, seen)
    assert not ours[:, 1].any()
    assert ours[:, 2].any()
    theirs = scaled_dot_product_attention(*some, attn_mask=seen, enable_gqa=True)
    assert not theirs[:, :, 1].any()


@pytest.mark.parametrize(("dtype", "n_queries"), KINDS, ids=str)
def test_keys_and_values_may_be_views(dtype: torch.dtype, n_queries: int) -> None:
    heads, key_heads, dim = 8, 2, 32
    query = torch.randn(2, n_queries, heads, dim).to(dtype).transpose(1, 2)
    whole = torch.randn(2, key_heads, 500, 2 * dim).to(dtype)
    for keys, values in (
        (whole[:, :, 100:400, :dim], whole[:, :, 100:400, dim:]),
        (whole[..., :dim].transpose(1, 2).contiguous().transpose(1, 2), whole[..., dim:]),
        (whole[:1, :1, :, :dim].expand(2, key_heads, 500, dim), whole[:, :, :, dim:]),
        (whole[:, :, ::3, :dim], whole[:, :, ::3, 1 : dim + 1]),
    ):
        ours = cpu_attention(query, keys, values)
        assert torch.equal(ours, cpu_attention(query.contiguous(), keys.contiguous(), values.contiguous()))


@pytest.mark.parametrize(("dtype", "n_queries"), KINDS, ids=str)
@pytest.mark.parametrize(("n_keys", "page_keys"), [(1, 16), (5, 4), (300, 16), (777, 7), (900, 600)])
def test_keys_and_values_may_lie_in_pages(dtype: torch.dtype, n_queries: int, n_keys: int, page_keys: int) -> None:
    query, keys, values = operands((8, 2, 32, 40), n_queries, n_keys, dtype)
    n_used = -(-n_keys // page_keys)
    numbers = torch.randperm(n_used + 5)[:n_used]
    paged = []
    for each in (keys, values):
        memory = torch.full((n_used + 5, page_keys, 2, each.shape[3]), torch.nan, dtype=dtype)
        for place, number in enumerate(numbers.tolist()):
            rows = each[0, :, place * page_keys : (place + 1) * page_keys].transpose(0, 1)
            memory[number, : len(rows)] = rows
        paged.append(memory.transpose(1, 2))
    pages = Pages(numbers, n_keys)
    mask = torch.rand(n_queries, n_keys) < 0.7
    for more in ({}, {"mask": mask}, {"is_causal": True, "scale": 0.3}):
        assert torch.equal(
            cpu_attention(query, *paged, pages=pages, **more), cpu_attention(query, keys, values, **more)
        )


@pytest.mark.parametrize(("dtype", "n_queries"), KINDS, ids=str)
def test_bits_do_not_depend_on_other_queries_heads_or_threads(dtype: torch.dtype, n_queries: int) -> None:
    query, key, value = operands((12, 4, 40, 48), n_queries, 700, dtype, batch=2)
    mask = torch.rand(2, 1, n_queries, 700) < 0.7
    together = cpu_attention(query, key, value, mask)
    for number in range(7 if n_queries <= FEW_QUERIES else 0):
        alone = cpu_attention(query[:, :, number : number + 1], key, value, mask[:, :, number : number + 1])
        assert torch.equal(alone[:, 0], together[:, number])
    for head in range(4):
        one = cpu_attention(
            query[:1, 3 * head : 3 * head + 1], key[:1, head : head + 1], value[:1, head : head + 1], mask[:1]
        )
        assert torch.equal(one[0, :, 0], together[0, :, 3 * head])
    with threads(2):
        assert all(torch.equal(cpu_attention(query, key, value, mask), together) for _ in range(10))


@pytest.mark.parametrize("n_queries", [2, pytest.param(333, marks=needs_many)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_non_finite_values_are_not_hidden(where: int, bad: float, n_queries: int) -> None:
    some = operands((2, 2, 16, 16), n_queries, 300, torch.bfloat16)
    some[where][0, 1, 1, 3] = bad
    out = cpu_attention(*some)
    assert out[:, :, 0].isfinite().all()
    assert not out[:, :, 1].isfinite().all()


def test_large_products_do_not_overflow() -> None:
    query, key, value = operands((2, 1, 64, 64), 1, 400, torch.float32)
    check((query * 30, key * 30, value))


def test_what_does_not_fit_is_refused() -> None:
    query, key, value = operands((4, 2, 16, 16), 2, 9, torch.bfloat16)
    many = operands((4, 2, 16, 16), FEW_QUERIES + 1, 9, torch.float16)
    odd = operands((4, 2, 7, 16), FEW_QUERIES + 1, 9, torch.bfloat16)
    mask = torch.ones(1, 1, 2, 8, dtype=torch.bool)
    turned = key.transpose(2, 3).contiguous().transpose(2, 3)
    for bad in (
        many, odd, (query.float(), key, value), (query[:, :3], key, value), (query, key[..., :8], value),
        (query, key, value[:, :, :8]), (query, key[:, :, :0], value[:, :, :0]), (query, turned, value),
        (query.double(), key.double(), value.double()), (query, key, value, mask), (query, key, value, mask.long()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="mask"):
            cpu_attention(*bad)
    for numbers, n_keys in ((torch.tensor([0]), 10), (torch.tensor([0, 0, 0, 0])[::2], 9)):
        with pytest.raises(ValueError, match="mask"):
            cpu_attention(query, key, value, pages=Pages(numbers, n_keys))
    with pytest.raises(ValueError, match="mask"):
        cpu_attention(*(each.expand(2, -1, -1, -1) for each in (query, key, value)), pages=Pages(torch.tensor([0]), 9))


@needs_many
def test_bits_do_not_depend_on_how_a_prompt_is_cut() -> None:
    query, key, value = operands((8, 2, 64, 64), 900, 900, torch.bfloat16)
    whole = cpu_attention(query, key, value, is_causal=True)
    seen = torch.ones(900, 900, dtype=torch.bool).tril()
    assert torch.equal(cpu_attention(query, key, value, seen), whole)
    for first, end in ((0, 17), (17, 300), (300, 349), (349, 900)):
        part = cpu_attention(query[:, :, first:end], key[:, :, :end], value[:, :, :end], seen[first:end, :end])
        assert torch.equal(part, whole[:, first:end])
