"""A row's result depends on the row and its experts only: not on the batch, the placement, the threads, or the run."""

from __future__ import annotations

import pytest
import torch

from moeoffload.kernels import prepare_layer

from .experts import DTYPES, call, gated_experts, random_rows, routes, threads

SHAPE = (16, 320, 160)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_alone_and_together_have_the_same_bits(dtype: torch.dtype) -> None:
    n_experts, hidden, inter = SHAPE
    layer = prepare_layer(gated_experts(n_experts, hidden, inter, dtype), kernel="tiled")
    rows = random_rows(150, hidden, dtype)
    slots, weights = routes(150, 8, n_experts)
    together = call(layer, rows, slots, weights)
    for size in (1, 2, 3, 4, 6, 7, 13, 64):
        for start in range(0, 150, size):
            part = slice(start, start + size)
            assert torch.equal(call(layer, rows[part], slots[part], weights[part]), together[part]), (size, start)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partial_sums_of_two_servers_add_up(dtype: torch.dtype) -> None:
    n_experts, hidden, inter = SHAPE
    layer = prepare_layer(gated_experts(n_experts, hidden, inter, dtype), kernel="tiled")
    rows = random_rows(9, hidden, dtype)
    slots, weights = routes(9, 2, n_experts)
    first, second = slots.clone(), slots.clone()
    first[:, 1], second[:, 0] = -1, -1
    parts = [call(layer, rows, part, weights) for part in (first, second)]
    assert torch.equal(parts[0] + parts[1], call(layer, rows, slots, weights))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_bits(dtype: torch.dtype) -> None:
    layer = prepare_layer(gated_experts(8, 512, 384, dtype), kernel="tiled")
    for n_rows in (1, 5, 40):
        rows = random_rows(n_rows, 512, dtype)
        slots, weights = routes(n_rows, 4, 8, absent=0.1)
        with threads(1):
            alone = call(layer, rows, slots, weights)
        with threads(2):
            assert all(torch.equal(call(layer, rows, slots, weights), alone) for _ in range(20))
