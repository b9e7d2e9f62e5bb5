"""A row's result depends on the row and its experts only: not on batch, placement, threads, workspace, or run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moeoffload.kernels import KernelInput, KernelWorkspace, LayerKernels

from .experts import DTYPES, call, gated_experts, random_rows, routes, threads

SHAPE = (16, 320, 160)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_alone_and_together_have_the_same_bits(dtype: torch.dtype) -> None:
    n_experts, hidden, inter = SHAPE
    layer = LayerKernels(gated_experts(n_experts, hidden, inter, dtype), kernel="tiled")
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
    layer = LayerKernels(gated_experts(n_experts, hidden, inter, dtype), kernel="tiled")
    rows = random_rows(9, hidden, dtype)
    slots, weights = routes(9, 2, n_experts)
    first, second = slots.clone(), slots.clone()
    first[:, 1], second[:, 0] = -1, -1
    parts = [call(layer, rows, part, weights) for part in (first, second)]
    assert torch.equal(parts[0] + parts[1], call(layer, rows, slots, weights))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_bits(dtype: torch.dtype) -> None:
    layer = LayerKernels(gated_experts(8, 512, 384, dtype), kernel="tiled")
    for n_rows in (1, 5, 40):
        rows = random_rows(n_rows, 512, dtype)
        slots, weights = routes(n_rows, 4, 8, absent=0.1)
        with threads(1):
            alone = call(layer, rows, slots, weights)
        with threads(2):
            assert all(torch.equal(call(layer, rows, slots, weights), alone) for _ in range(20))


def test_layers_of_any_shape_share_a_workspace() -> None:
    shared = KernelWorkspace()
    for n in (1, 2, 3, 1):
        experts = gated_experts(3 + n, 64 * n, 32 * n, torch.bfloat16, seed=n)
        inputs = (random_rows(5, 64 * n, torch.bfloat16), *routes(5, 2, 3 + n))
        first, second = (call(LayerKernels(experts, each), *inputs) for each in (shared, KernelWorkspace()))
        assert torch.equal(first, second)


def test_decode_and_prefill_do_not_resize_each_others_buffers() -> None:
    workspace = KernelWorkspace()
    layer = LayerKernels(gated_experts(8, 64, 32, torch.bfloat16), workspace)
    made = []
    for n_rows in (1, 100, 4, 50, 16, 100, 1):
        slots, weights = routes(n_rows, 4, 8)
        call(layer, random_rows(n_rows, 64, torch.bfloat16), slots, weights)
        made.append(workspace.n_created)
    assert made[1:] == [made[1]] * 6


def test_threads_with_workspaces_of_their_own_do_not_disturb_each_other() -> None:
    layer = LayerKernels(gated_experts(8, 256, 128, torch.bfloat16))
    rows = random_rows(12, 256, torch.bfloat16)
    slots, weights = routes(12, 4, 8)
    expected = call(layer, rows, slots, weights)

    def is_right(_: int) -> bool:
        workspace, out = KernelWorkspace(), torch.empty(12, 256)
        for _ in range(200):
            layer(KernelInput(rows, slots, weights, out), workspace)
            if not torch.equal(out, expected):
                return False
        return True

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(is_right, range(3)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_workspace_has_room_for_more_rows_of_fewer_routes(dtype: torch.dtype) -> None:
    workspace = KernelWorkspace()
    layer = LayerKernels(gated_experts(8, 72, 32, dtype), workspace, "tiled")
    for n_rows, top_k in ((20, 4), (40, 2), (80, 1)):
        inputs = random_rows(n_rows, 72, dtype), *routes(n_rows, top_k, 8)
        result = call(layer, *inputs)
        assert torch.equal(result, call(LayerKernels(gated_experts(8, 72, 32, dtype), kernel="tiled"), *inputs))
        arena = workspace.arena(layer._tiled.shape, n_rows, top_k)
        assert arena.buffers["operands"].numel() >= n_rows * 72 * dtype.itemsize
