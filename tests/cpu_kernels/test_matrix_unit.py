"""Experts on a CPU with a matrix unit: any number of rows of an expert, alone and together; what it is not for."""

from __future__ import annotations

import pytest
import torch
from gpu_kernels.experts_modules import reference

from moeoffload.kernels import prepare_layer
from moeoffload.native import Features, cpu_features

from .experts import call, gated_experts, random_rows, threads

pytestmark = pytest.mark.skipif(Features.MATRIX_UNIT not in cpu_features(), reason="no usable matrix unit")


@pytest.mark.parametrize("n_threads", [1, 2])
def test_any_number_of_rows_of_an_expert(n_threads: int) -> None:
    # One expert takes all rows, so tiles of rows have every size; others take what the slots leave them.
    experts = gated_experts(3, 96, 64, torch.bfloat16, integers=True)
    experts.gate_up_proj.copy_(experts.gate_up_proj.sign())
    layer = prepare_layer(experts, kernel="tiled")
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


def test_rows_that_are_not_finite_stay_so_and_alone() -> None:
    layer = prepare_layer(gated_experts(2, 64, 32, torch.bfloat16), kernel="tiled")
    rows = random_rows(20, 64, torch.bfloat16)
    slots, weights = torch.zeros(20, 1, dtype=torch.int64), torch.ones(20, 1)
    good = call(layer, rows, slots, weights)
    rows[3, 5], rows[17, 0] = torch.inf, torch.nan
    result = call(layer, rows, slots, weights)
    assert not result[3].isfinite().all()
    assert not result[17].isfinite().all()
    others = [row for row in range(20) if row not in (3, 17)]
    assert torch.equal(result[others], good[others])
