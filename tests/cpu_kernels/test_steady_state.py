"""Workspaces: made once for calls of any size, shared by layers, never by threads. No objects: test_decode_reuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moeoffload.kernels import KernelWorkspace, prepare_layer

from .experts import DTYPES, call, gated_experts, random_rows, routes


def test_decode_and_prefill_do_not_resize_each_others_buffers() -> None:
    workspace = KernelWorkspace()
    layer = prepare_layer(gated_experts(8, 64, 32, torch.bfloat16), workspace)
    made = []
    for n_rows in (1, 100, 4, 50, 16, 100, 1):
        slots, weights = routes(n_rows, 4, 8)
        call(layer, random_rows(n_rows, 64, torch.bfloat16), slots, weights)
        made.append(workspace.n_created)
    assert made[1:] == [made[1]] * 6


def test_threads_with_workspaces_of_their_own_do_not_disturb_each_other() -> None:
    layer = prepare_layer(gated_experts(8, 256, 128, torch.bfloat16))
    rows = random_rows(12, 256, torch.bfloat16)
    slots, weights = routes(12, 4, 8)
    expected = call(layer, rows, slots, weights)

    def is_right(_: int) -> bool:
        workspace, out = KernelWorkspace(), torch.empty(12, 256)
        for _ in range(200):
            layer(rows, slots, weights, out, workspace)
            if not torch.equal(out, expected):
                return False
        return True

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(is_right, range(3)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_workspace_has_room_for_more_rows_of_fewer_routes(dtype: torch.dtype) -> None:
    workspace = KernelWorkspace()
    layer = prepare_layer(gated_experts(8, 72, 32, dtype), workspace, "tiled")
    for n_rows, top_k in ((20, 4), (40, 2), (80, 1)):
        inputs = random_rows(n_rows, 72, dtype), *routes(n_rows, top_k, 8)
        result = call(layer, *inputs)
        assert torch.equal(result, call(prepare_layer(gated_experts(8, 72, 32, dtype), kernel="tiled"), *inputs))
        arena = workspace.arena(layer._tiled.shape, n_rows, top_k)
        assert arena.buffers["operands"].numel() >= n_rows * 72 * dtype.itemsize
