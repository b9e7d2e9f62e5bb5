"""Timing a server: what is timed is what a run will ask of it, and a simulated slow server is slow by its factor."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import slow_server
import torch

from moeoffload.expert_server import calibrate
from moeoffload.expert_server.calibrate import time_layer
from moeoffload.kernels import KernelWorkspace, LayerKernels

HIDDEN = 8


class Recorded:
    """Stands for a layer with 6 of 24 experts here; keeps the slots that it is called with."""

    hidden, dtype, n_experts = HIDDEN, torch.float32, 6

    def __init__(self) -> None:
        self.calls: list[torch.Tensor] = []

    def __call__(self, rows: torch.Tensor, slots: torch.Tensor, *rest: object) -> None:
        assert rows.shape == (slots.shape[0], HIDDEN)
        self.calls.append(slots)


def timed(n_experts: int) -> tuple[list[tuple[int, float]], list[torch.Tensor]]:
    layer = Recorded()
    timings = time_layer(
        layer,  # type: ignore[arg-type]
        4,
        100,
        n_experts=n_experts,
        device=torch.device("cpu"),
        workspace=KernelWorkspace(),
    )
    return timings, layer.calls


def test_rows_have_as_many_experts_here_as_they_will_have_in_a_run() -> None:
    timings, calls = timed(n_experts=24)
    assert [rows for rows, _ in timings] == [1, 4, 16, 64, 100]
    largest = calls[-1]
    assert ((largest >= -1) & (largest < 6)).all()
    assert (largest >= 0).any(dim=1).all(), "rows without an expert here are not sent"
    # A row misses all 6 of 24 experts with probability 18*17*16*15/(24*23*22*21) = 0.29.
    assert 55 <= largest.shape[0] <= 85
    assert 0.8 <= (largest >= 0).sum().item() / (100 * 4 * 6 / 24) <= 1.2
    assert all(len(call) for call in calls), "even a single row has an expert here"


def test_a_server_with_all_experts_is_timed_with_all_of_each_row() -> None:
    _, calls = timed(n_experts=6)
    assert calls[-1].shape == (100, 4)
    assert (calls[-1] >= 0).all()
    assert all(len(set(row.tolist())) == 4 for row in calls[-1]), "different experts"


class Disturbed(Recorded):
    """A layer whose calls take the given times (seconds), then ever the last of them, by a clock of its own, `now`."""

    def __init__(self, *takes_s: float) -> None:
        super().__init__()
        self.takes_s = list(takes_s)
        self.now = 0.0

    def __call__(self, rows: torch.Tensor, slots: torch.Tensor, *rest: object) -> None:
        super().__call__(rows, slots)
        self.now += self.takes_s.pop(0) if len(self.takes_s) > 1 else self.takes_s[0]

    def in_slices(self, *arguments: Any) -> Iterator[None]:
        yield
        LayerKernels.__call__(self, *arguments)  # type: ignore[arg-type]
        yield


def time_first_size(layer: Disturbed, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(calibrate, "perf_counter", lambda: layer.now)
    ((_, seconds),) = time_layer(
        layer,  # type: ignore[arg-type]
        4,
        1,
        n_experts=6,
        device=torch.device("cpu"),
        workspace=KernelWorkspace(),
    )
    return seconds


def test_a_busy_machine_does_not_make_a_server_look_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Disturbed(9e-3, 5e-3, 7e-3, 4e-3, 3e-3, 2.5e-3, 2e-3, 1e-3)
    assert time_first_size(layer, monkeypatch) == pytest.approx(1e-3)
    assert len(layer.calls) == calibrate.REPEATS
    long = Disturbed(2 * calibrate.LONG_S)
    time_first_size(long, monkeypatch)
    assert len(long.calls) == 2, "long calls are not repeated for long"


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long `slow_server` sleeps, by the clock of a `Disturbed`; what it changes is changed back afterwards."""
    naps: list[float] = []
    monkeypatch.setattr(slow_server, "time", SimpleNamespace(sleep=naps.append))
    monkeypatch.setattr(LayerKernels, "__call__", Disturbed.__call__)
    monkeypatch.setattr(LayerKernels, "in_slices", Disturbed.in_slices)
    return naps


def nap_of(layer: Disturbed, slots: list[list[int]], slept: list[float], sliced: bool = False) -> float:
    """What a call with these slots sleeps, in seconds."""
    slept.clear()
    kernels, call = cast("Any", LayerKernels), (layer, torch.empty(len(slots), HIDDEN), torch.tensor(slots), None, None)
    if sliced:
        list(kernels.in_slices(*call))
    else:
        kernels.__call__(*call)
    return sum(slept)


@pytest.mark.parametrize("sliced", [False, True])
def test_a_slow_server_takes_a_multiple_of_what_the_routes_took_at_best(
    slept: list[float], monkeypatch: pytest.MonkeyPatch, sliced: bool
) -> None:
    layer = Disturbed(0.3, 0.6, 0.1)
    monkeypatch.setattr(slow_server, "perf_counter", lambda: layer.now)
    slow_server.slow_down(factor=4)
    assert nap_of(layer, [[0, 1, -1, 2]], slept, sliced) == pytest.approx(0.9)
    # The same routes, disturbed: they took twice as long, and are held as long as before, all in all.
    assert nap_of(layer, [[0, 1, -1, 2]], slept, sliced) == pytest.approx(0.6)
    # One route takes a third of three.
    assert nap_of(layer, [[5, -1, -1, -1]], slept, sliced) == pytest.approx(0.3)


def test_only_what_is_asked_for_is_slowed(slept: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Disturbed(0.1)
    monkeypatch.setattr(slow_server, "perf_counter", lambda: layer.now)
    slow_server.slow_down(above=4, above_factor=8)
    assert nap_of(layer, [[0, 1]] * 4, slept) == 0
    assert nap_of(layer, [[0, 1]] * 5, slept) == pytest.approx(0.7)
