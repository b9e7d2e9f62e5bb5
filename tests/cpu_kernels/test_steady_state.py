"""After the first call nothing is made any more: no buffer, no compiled code."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numba
import pytest
import torch

from moeoffload.kernels import KernelWorkspace, prepare_layer, warm_up, words
from moeoffload.kernels import program as programs

from .experts import DTYPES, call, gated_experts, random_rows, routes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_thousand_calls_make_nothing(dtype: torch.dtype) -> None:
    workspace = KernelWorkspace()
    layers = [prepare_layer(gated_experts(8, 64, 32, dtype, seed=seed), workspace) for seed in range(3)]
    inputs = []
    for n_rows in (1, 2, 4, 16, 64):
        slots, weights = routes(n_rows, 4, 8, seed=n_rows, absent=0.1)
        inputs.append((random_rows(n_rows, 64, dtype), slots, weights, torch.empty(n_rows, 64)))
    layers[0].reserve(64, 4)
    made = workspace.n_created
    n_bytes = workspace.n_bytes

    def run(times: int) -> None:
        for number in range(times):
            layers[number % 3](*inputs[number % 5])

    run(30)
    gc.collect()
    tracemalloc.start()
    run(15)
    before = tracemalloc.get_traced_memory()[0]
    run(1000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 512
    assert workspace.n_created == made
    assert workspace.n_bytes == n_bytes


def test_decode_and_prefill_do_not_resize_each_others_buffers() -> None:
    workspace = KernelWorkspace()
    layer = prepare_layer(gated_experts(8, 64, 32, torch.bfloat16), workspace)
    made = []
    for n_rows in (1, 100, 4, 50, 16, 100, 1):
        slots, weights = routes(n_rows, 4, 8)
        call(layer, random_rows(n_rows, 64, torch.bfloat16), slots, weights)
        made.append(workspace.n_created)
    assert made[1:] == [made[1]] * 6


def test_nothing_is_compiled_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(DTYPES)

    def compiles(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(programs, "compile_entry", compiles)
    for dtype in DTYPES:
        slots, weights = routes(3, 2, 4)
        for route_weights in (weights, weights.to(dtype)):
            call(prepare_layer(gated_experts(4, 64, 32, dtype)), random_rows(3, 64, dtype), slots, route_weights)


def test_a_cache_that_cannot_be_written_only_costs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_function = numba.cfunc
    kept = []

    def cfunc(*arguments: object, **options: object) -> object:
        kept.append(options.get("cache", False))
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_function(*arguments, **options)

    monkeypatch.setattr(numba, "cfunc", cfunc)
    assert programs.Program(programs._make_linear_entry, torch.float32).address
    assert kept == [True, False]


def test_a_second_process_loads_the_code_from_disk() -> None:
    warm_up([torch.float32])
    code = """
import torch
from numba.core import event
from moeoffload.kernels import warm_up
with event.install_recorder("numba:compile") as recorder:
    warm_up([torch.float32])
print(len(recorder.buffer))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "0"


def test_threads_with_workspaces_of_their_own_do_not_disturb_each_other() -> None:
    layer = prepare_layer(gated_experts(8, 256, 128, torch.bfloat16))
    rows = random_rows(12, 256, torch.bfloat16)
    slots, weights = routes(12, 4, 8)
    expected = call(layer, rows, slots, weights)
    wrong = []

    def run() -> None:
        workspace, out = KernelWorkspace(), torch.empty(12, 256)
        for _ in range(200):
            layer(rows, slots, weights, out, workspace)
            if not torch.equal(out, expected):
                wrong.append(out.clone())

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


_PORTABLE = """
import torch
from moeoffload.kernels import prepare_layer
from moeoffload.kernels.program import row_dtype
from moeoffload.kernels.tile import TILE_ROWS
from cpu_kernels.experts import call, exact, gated_experts, random_rows, routes
assert row_dtype(torch.bfloat16) == torch.float32 and TILE_ROWS == 2
for hidden, inter in ((64, 32), (130, 77)):
    experts = gated_experts(6, hidden, inter, torch.bfloat16)
    layer = prepare_layer(experts, kernel="tiled")
    for n_rows in (1, 2, 5, 21):
        rows = random_rows(n_rows, hidden, torch.bfloat16)
        slots, weights = routes(n_rows, 3, 6, absent=0.2)
        out, truth = call(layer, rows, slots, weights), exact(experts, rows, slots, weights)
        assert (out - truth).abs().max() <= 2**-5 * truth.abs().max().clamp(min=1.0)
print("fine")
"""


def test_a_cpu_without_512_bit_vectors_and_bfloat16_products(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", _PORTABLE],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": ":".join(sys.path),
            "NUMBA_CPU_NAME": "haswell",
            "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+sse4.2",
            "NUMBA_CACHE_DIR": str(tmp_path),
        },
    )
    assert found.stdout.strip() == "fine", found.stderr


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_workspace_has_room_for_more_rows_of_fewer_routes(dtype: torch.dtype) -> None:
    workspace = KernelWorkspace()
    layer = prepare_layer(gated_experts(8, 72, 32, dtype), workspace, "tiled")
    for n_rows, top_k in ((20, 4), (40, 2), (80, 1)):
        inputs = random_rows(n_rows, 72, dtype), *routes(n_rows, top_k, 8)
        result = call(layer, *inputs)
        assert torch.equal(result, call(prepare_layer(gated_experts(8, 72, 32, dtype), kernel="tiled"), *inputs))
        assert layer.shape is not None
        arena = workspace.arena(layer.shape, n_rows, top_k)
        needed = n_rows * 72 * 4 if layer.shape.converts_rows else 0
        assert arena.buffers[words.OPERANDS].numel() >= needed
