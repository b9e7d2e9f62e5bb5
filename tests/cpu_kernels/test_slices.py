"""A call that is computed in slices has the bits of one that is not, whatever is computed between its slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_kernels.experts_modules import make_experts

from moeoffload.kernels import KernelInput, KernelWorkspace, LayerKernels, calls, tiled

from .experts import DTYPES, call, gated_experts, random_rows, routes, threads


@pytest.fixture
def tiny_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of one expert, and of at most seven of its routes."""
    monkeypatch.setattr(tiled, "SLICE_S", 1e-12)
    monkeypatch.setattr(tiled, "PIECE_ROUTES", 7)


def sliced(layer: LayerKernels, inputs: tuple[torch.Tensor, ...], between: Any = lambda: None) -> torch.Tensor:
    """The result of a call in slices, with ``between()`` after each."""
    rows, slots, weights = inputs
    out = torch.full(rows.shape, torch.nan, dtype=torch.float32)
    n_slices = 0
    for _ in layer.in_slices(KernelInput(rows, slots, weights, out)):
        n_slices += 1
        between()
    assert n_slices > 4, "it was one slice"
    return out


@pytest.mark.usefixtures("tiny_slices")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_rows", [1, 5, 60])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_slices_have_the_bits_of_one_call(dtype: torch.dtype, n_rows: int, n_threads: int) -> None:
    layer = LayerKernels(gated_experts(16, 320, 160, dtype), kernel="tiled")
    inputs = (random_rows(n_rows, 320, dtype), *routes(n_rows, 8, 16, absent=0.2))
    with threads(n_threads):
        whole = call(layer, *inputs)
        assert torch.equal(sliced(layer, inputs), whole)
        assert torch.equal(call(layer, *inputs), whole), "a whole call after one in slices"


class Slices:
    """Records how many routes each slice of a projection has; by its clock UP takes 0.2 ms a route, DOWN 0.1 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.up: list[int] = []
        self.down: list[int] = []
        self._now = 0.0
        self._compute = tiled.TiledExperts._compute
        monkeypatch.setattr(tiled, "perf_counter", lambda: self._now)
        monkeypatch.setattr(tiled.TiledExperts, "_compute", lambda *call: self._record(*call))

    def _record(self, experts: Any, arena: Any, steps: calls.Step) -> None:
        self._compute(experts, arena, steps)
        n_routes = arena.call.end - arena.call.begin
        if steps & calls.Step.UP:
            self.up.append(n_routes)
            self._now += 0.2e-3 * n_routes
        elif steps & calls.Step.DOWN:
            self.down.append(n_routes)
            self._now += 0.1e-3 * n_routes

    def of_a_call(self, layer: LayerKernels, inputs: tuple[torch.Tensor, ...]) -> tuple[list[int], list[int]]:
        """Those of the last of some calls."""
        for _ in range(10):
            self.up, self.down = [], []
            rows, slots, weights = inputs
            for _ in layer.in_slices(KernelInput(rows, slots, weights, torch.empty(rows.shape))):
                pass
        return self.up, self.down


def test_slices_become_as_long_as_they_shall_by_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LayerKernels(gated_experts(16, 320, 160, torch.bfloat16), kernel="tiled")
    monkeypatch.setattr(tiled, "SLICE_S", 5.5e-3)
    slices = Slices(monkeypatch)
    rows, weights = random_rows(20, 320, torch.bfloat16), torch.full((20, 8), 1 / 8)
    slots = torch.arange(20 * 8).reshape(20, 8) % 16  # 10 routes each
    up, down = slices.of_a_call(layer, (rows, slots, weights))
    assert up == [30, 30, 30, 30, 30, 10], "whole experts, until they take long enough"
    assert down == [60, 60, 40]


def test_routes_of_one_expert_are_cut_where_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LayerKernels(gated_experts(4, 320, 160, torch.bfloat16), kernel="tiled")
    monkeypatch.setattr(tiled, "SLICE_S", 14e-3)
    slices = Slices(monkeypatch)
    inputs = random_rows(300, 320, torch.bfloat16), torch.full((300, 1), 2), torch.ones(300, 1)
    up, down = slices.of_a_call(layer, inputs)
    assert up == [64, 64, 64, 64, 44], "in pieces of 32"
    assert down == [128, 128, 44]


@pytest.mark.usefixtures("tiny_slices")
def test_another_call_in_between_disturbs_neither() -> None:
    layer = LayerKernels(gated_experts(16, 320, 160, torch.bfloat16), kernel="tiled")
    other, urgent = LayerKernels(gated_experts(8, 320, 160, torch.bfloat16, seed=1), kernel="tiled"), KernelWorkspace()
    large = (random_rows(64, 320, torch.bfloat16), *routes(64, 8, 16))
    small = (random_rows(2, 320, torch.bfloat16, seed=2), *routes(2, 4, 8))
    expected, expected_small = call(layer, *large), call(other, *small)
    results = []

    def between() -> None:
        out = torch.full(small[0].shape, torch.nan, dtype=torch.float32)
        other(KernelInput(*small, out), urgent)
        results.append(out)

    assert torch.equal(sliced(layer, large, between), expected)
    assert all(torch.equal(result, expected_small) for result in results)


@pytest.mark.usefixtures("tiny_slices")
def test_experts_with_bias_and_an_activation_of_their_own() -> None:
    experts = make_experts("gpt_oss", 8, 128, 96, torch.float32, seed=1)
    layer = LayerKernels(experts, kernel="tiled")
    inputs = (random_rows(40, 128, torch.float32), *routes(40, 2, 8, absent=0.2))
    assert torch.equal(sliced(layer, inputs), call(layer, *inputs))


def test_a_slot_that_does_not_exist_is_refused_before_the_first_slice() -> None:
    layer = LayerKernels(gated_experts(4, 64, 32, torch.float32), kernel="tiled")
    rows, slots, weights = random_rows(3, 64, torch.float32), *routes(3, 2, 4)
    slots[1, 1] = 4
    with pytest.raises(IndexError, match="slot"):
        next(layer.in_slices(KernelInput(rows, slots, weights, torch.zeros(3, 64))))
