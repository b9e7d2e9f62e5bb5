"""The tiled kernel against float64 and against transformers, for every dtype, shape, CPU and number of rows."""

from __future__ import annotations

import pytest
import torch
from experts_modules import reference

from moeoffload import native
from moeoffload.kernels import LayerKernels, grouped_experts
from moeoffload.native import Features, cpu_features

from .experts import (
    DTYPES,
    EPSILON,
    call,
    gated_experts,
    instruction_sets,
    random_call,
    random_rows,
    routes,
    threads,
    transformers_result,
)

# (experts, hidden, inter, top_k); inner dimensions that are no multiple of any vector among them.
SHAPES = [(8, 64, 32, 2), (5, 72, 36, 3), (6, 2048, 96, 4), (16, 130, 770, 8), (3, 33, 7, 1), (4, 4, 4, 2)]


@pytest.mark.parametrize("features", instruction_sets(), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_as_near_to_exact_as_the_dtype_allows_and_of_each_row_alone(
    dtype: torch.dtype, shape: tuple[int, int, int, int], features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "cpu_features", lambda: features)
    n_experts, hidden, inter, top_k = shape
    experts = gated_experts(n_experts, hidden, inter, dtype)
    layer = LayerKernels(experts, kernel="tiled")
    for n_rows in (1, 2, 3, 5, 7, 16, 17, 40):
        rows, slots, weights = random_call(n_rows, hidden, dtype, top_k, n_experts, seed=n_rows, absent=0.2)
        truth = reference(experts, rows, slots, weights)
        for route_weights in (weights, weights.to(dtype)):
            out = call(layer, rows, slots, route_weights)
            bound = 8 * EPSILON[dtype] * truth.abs().max().clamp(min=1.0)
            assert (out - truth).abs().max() <= bound, (n_rows, route_weights.dtype)
        for row in range(0, n_rows, 5):
            one = slice(row, row + 1)
            assert torch.equal(call(layer, rows[one], slots[one], route_weights[one]), out[one]), (n_rows, row)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rounding_is_where_transformers_has_it(dtype: torch.dtype) -> None:
    # Dot products of small integers, or with a single factor, are exact in any order: only rounding is left to differ.
    experts = gated_experts(8, 64, 32, dtype, integers=True)
    experts.down_proj.copy_(torch.eye(32).repeat(2, 1)[torch.randperm(64)])
    layer = LayerKernels(experts, kernel="tiled")
    for n_rows in (1, 3, 16, 40):
        rows = random_rows(n_rows, 64, torch.float32, seed=n_rows).mul(1.5).round().to(dtype)
        slots, weights = routes(n_rows, 4, 8, seed=n_rows)
        for route_weights in (weights, weights.to(dtype)):
            ours = call(layer, rows, slots, route_weights).to(dtype)
            assert torch.equal(ours, transformers_result(experts, rows, slots, route_weights))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_choice_has_transformers_bits(dtype: torch.dtype) -> None:
    experts = gated_experts(8, 64, 32, dtype)
    layer = LayerKernels(experts, kernel="grouped")
    rows, slots, weights = random_call(20, 64, dtype, 4, 8)
    assert layer.kernel_for(20) == "grouped"
    for route_weights in (weights, weights.to(dtype)):
        ours = call(layer, rows, slots, route_weights)
        assert torch.equal(ours.to(dtype), transformers_result(experts, rows, slots, route_weights))
        assert torch.equal(ours, grouped_experts(experts, rows, slots, route_weights))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation_has_torchs_bits(dtype: torch.dtype) -> None:
    # With unit matrices the experts are silu(x) * x, so all values of a 16-bit dtype can be looked at.
    experts = gated_experts(1, 128, 128, dtype)
    experts.gate_up_proj.copy_(torch.eye(128).repeat(2, 1))
    experts.down_proj.copy_(torch.eye(128))
    if dtype.itemsize == 2:
        values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        # The unit matrix turns an infinity into 0 * inf, and bfloat16 hardware takes subnormal factors for zero.
        fits = (values.abs() < torch.finfo(dtype).max ** 0.5) & (values.abs() >= torch.finfo(dtype).tiny)
        values = values.masked_fill(~fits, 0.0)
    else:
        random = torch.randn(2**15 - 256, generator=torch.Generator().manual_seed(0)) * 20
        values = torch.cat((random, torch.linspace(-200, 200, 256)))
    rows = values.view(-1, 128)
    ours = call(LayerKernels(experts, kernel="tiled"), rows, torch.zeros(len(rows), 1).long(), torch.ones(len(rows), 1))
    theirs = (torch.nn.functional.silu(rows) * rows).float()
    tiny = theirs.abs() < torch.finfo(dtype).tiny
    assert torch.equal(ours.masked_fill(tiny, 0.0), theirs.masked_fill(tiny, 0.0))


needs_matrix_unit = pytest.mark.skipif(Features.MATRIX_UNIT not in cpu_features(), reason="no usable matrix unit")


@needs_matrix_unit
@pytest.mark.parametrize("n_threads", [1, 2])
def test_the_matrix_unit_takes_any_number_of_rows_of_an_expert(n_threads: int) -> None:
    # One expert takes all rows, so tiles of rows have every size; others take what the slots leave them.
    experts = gated_experts(3, 96, 64, torch.bfloat16, integers=True)
    experts.gate_up_proj.copy_(experts.gate_up_proj.sign())
    layer = LayerKernels(experts, kernel="tiled")
    with threads(n_threads):
        for n_rows in (*range(1, 19), 31, 32, 33, 47, 48, 49, 64, 65, 130):
            rows = random_rows(n_rows, 96, torch.bfloat16, seed=n_rows)
            slots = torch.zeros(n_rows, 2, dtype=torch.int64)
            slots[:, 1] = torch.arange(n_rows) % 5 - 2  # -2 is no slot
            slots[:, 1].clamp_(min=-1)
            weights = torch.rand(n_rows, 2, generator=torch.Generator().manual_seed(n_rows))
            truth = reference(experts, rows, slots, weights)
            result = call(layer, rows, slots, weights)
            assert (result - truth).abs().max() <= 2**-5 * truth.abs().max(), n_rows
            for row in range(0, n_rows, 11):
                one = slice(row, row + 1)
                assert torch.equal(call(layer, rows[one], slots[one], weights[one]), result[one]), (n_rows, row)
