"""Timing a server: what is timed is what a run will ask of it; and how long a dispatch may take by that."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeoffload.expert_server import calibrate
from moeoffload.expert_server.calibrate import time_layer
from moeoffload.host.deadlines import Deadlines
from moeoffload.kernels import KernelWorkspace

HIDDEN = 8


class Recorded:
    """Stands for a layer with 6 of 24 experts here; keeps the slots that it is called with."""

    hidden, dtype, n_experts = HIDDEN, torch.float32, 6

    def __init__(self) -> None:
        self.calls: list[torch.Tensor] = []

    def __call__(self, rows: torch.Tensor, slots: torch.Tensor, *rest: object) -> None:
        assert rows.shape == (slots.shape[0], HIDDEN)
        self.calls.append(slots)


def timed(layer: Any, n_rows: int, n_experts: int) -> list[tuple[int, float]]:
    return time_layer(layer, 4, n_rows, n_experts=n_experts, device=torch.device("cpu"), workspace=KernelWorkspace())


def test_rows_have_as_many_experts_here_as_they_will_have_in_a_run() -> None:
    layer = Recorded()
    timings, calls = timed(layer, 100, 24), layer.calls
    assert [rows for rows, _ in timings] == [1, 4, 16, 64, 100]
    largest = calls[-1]
    assert ((largest >= -1) & (largest < 6)).all()
    assert (largest >= 0).any(dim=1).all(), "rows without an expert here are not sent"
    # A row misses all 6 of 24 experts with probability 18*17*16*15/(24*23*22*21) = 0.29.
    assert 55 <= largest.shape[0] <= 85
    assert 0.8 <= (largest >= 0).sum().item() / (100 * 4 * 6 / 24) <= 1.2
    assert all(len(call) for call in calls), "even a single row has an expert here"


def test_a_server_with_all_experts_is_timed_with_all_of_each_row() -> None:
    layer = Recorded()
    timed(layer, 100, 6)
    calls = layer.calls
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


def time_first_size(layer: Disturbed, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(calibrate, "perf_counter", lambda: layer.now)
    ((_, seconds),) = timed(layer, 1, 6)
    return seconds


def test_a_busy_machine_does_not_make_a_server_look_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Disturbed(9e-3, 5e-3, 7e-3, 4e-3, 3e-3, 2.5e-3, 2e-3, 1e-3)
    assert time_first_size(layer, monkeypatch) == pytest.approx(1e-3)
    assert len(layer.calls) == calibrate.REPEATS
    long = Disturbed(2 * calibrate.LONG_S)
    time_first_size(long, monkeypatch)
    assert len(long.calls) == 2, "long calls are not repeated for long"


def test_a_deadline_follows_the_timings_and_the_waits_between_floor_and_ceiling() -> None:
    deadlines = Deadlines(2.0, 60.0, 4, [(256, 0.5), (1, 0.01)])
    assert [deadlines.of(rows) for rows in (1, 256, 512, 4096)] == [2.0, 16.0, 32.0, 60.0]
    assert deadlines.of(100) == pytest.approx(8 * 4 * (0.01 + 99 / 255 * 0.49))
    deadlines.waited(1.0)
    assert deadlines.of(1) == 8.0
    for _ in range(1000):
        deadlines.waited(0.001)
    assert deadlines.of(1) == 2.0
    assert Deadlines(2.0, 60.0, 4, []).of(4096) == 2.0
