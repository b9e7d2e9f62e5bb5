"""Every set of instructions that the kernels know: results are as near to exact as with any other."""

from __future__ import annotations

import pytest
import torch

from moeoffload import native
from moeoffload.kernels import KernelWorkspace, prepare_layer
from moeoffload.kernels.dense import few_row_linear
from moeoffload.kernels.pack import SumEncoder
from moeoffload.native import Features

from .experts import DTYPES, call, exact, gated_experts, instruction_sets, random_rows, routes

EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}


@pytest.fixture(params=instruction_sets(), ids=str)
def features(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Features:
    monkeypatch.setattr(native, "cpu_features", lambda: request.param)
    return request.param


@pytest.mark.usefixtures("features")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 32), (130, 77), (1056, 96)], ids=str)
def test_experts(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    experts = gated_experts(6, *shape, dtype)
    layer = prepare_layer(experts, KernelWorkspace(), kernel="tiled")
    for n_rows in (1, 2, 5, 21, 64):
        rows = random_rows(n_rows, shape[0], dtype)
        slots, weights = routes(n_rows, 3, 6, absent=0.2)
        out, truth = call(layer, rows, slots, weights), exact(experts, rows, slots, weights)
        assert (out - truth).abs().max() <= 8 * EPSILON[dtype] * truth.abs().max().clamp(min=1.0)
        for row in range(0, n_rows, 5):
            one = slice(row, row + 1)
            assert torch.equal(call(layer, rows[one], slots[one], weights[one]), out[one]), (n_rows, row)


@pytest.mark.usefixtures("features")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_layers(dtype: torch.dtype) -> None:
    for n_in, n_out in ((64, 32), (130, 77), (1, 1)):
        weight, bias = random_rows(n_out, n_in, dtype), random_rows(1, n_out, dtype)[0]
        x = random_rows(7, n_in, dtype, seed=1)
        truth = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        assert (few_row_linear(x, weight, bias) - truth).abs().max() <= 4 * EPSILON[dtype] * truth.abs().max()


@pytest.mark.usefixtures("features")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_torchs_for_values_of_all_sizes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 4099, generator=generator) * torch.logspace(-9, 4, 4099)
    halfway = torch.arange(1, 2049) * 2.0**-25  # between two subnormal numbers of float16
    for sums in (values, -values, halfway.view(1, -1)):
        out = torch.empty(sums.shape, dtype=dtype)
        assert SumEncoder(dtype).encode(sums, out) is None
        assert torch.equal(out, sums.to(dtype))
