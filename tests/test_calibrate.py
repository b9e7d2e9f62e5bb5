"""Timing a server: what is timed is what a run will ask of it, and a simulated slow server is slow by its factor."""

from __future__ import annotations

import time
from time import perf_counter

import pytest
import torch

from moeoffload.errors import SettingError
from moeoffload.expert_server import calibrate
from moeoffload.expert_server.calibrate import Pace, time_layer
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


def timed(n_experts: int) -> tuple[list[tuple[int, float]], list[torch.Tensor]]:
    layer = Recorded()
    timings = time_layer(
        layer,  # type: ignore[arg-type]
        4,
        100,
        n_experts=n_experts,
        device=torch.device("cpu"),
        workspace=KernelWorkspace(),
        pace=Pace(),
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


def time_first_size(layer: Disturbed, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(calibrate, "perf_counter", lambda: layer.now)
    ((_, seconds),) = time_layer(
        layer,  # type: ignore[arg-type]
        4,
        1,
        n_experts=6,
        device=torch.device("cpu"),
        workspace=KernelWorkspace(),
        pace=Pace(),
    )
    return seconds


def test_a_busy_machine_does_not_make_a_server_look_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first calls are disturbed, each by another amount: what is timed goes on until calls agree.
    layer = Disturbed(9e-3, 5e-3, 7e-3, 4e-3, 3e-3, 2.5e-3, 2e-3, 1e-3)
    assert time_first_size(layer, monkeypatch) == pytest.approx(1e-3)
    assert len(layer.calls) == 10
    calm = Disturbed(1e-3)
    assert time_first_size(calm, monkeypatch) == pytest.approx(1e-3)
    assert len(calm.calls) == calibrate.LEAST_REPEATS


def test_a_timing_that_does_not_become_stable_ends_and_says_its_spread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    restless = Disturbed(*(1e-3 * 1.3**n for n in range(200, -1, -1)))
    with caplog.at_level("INFO"):
        time_first_size(restless, monkeypatch)
    assert len(restless.calls) == 2, "long calls are not repeated for long"
    restless = Disturbed(*(1e-6 * 1.1**n for n in range(60, -1, -1)))
    with caplog.at_level("INFO"):
        time_first_size(restless, monkeypatch)
    assert len(restless.calls) == calibrate.MOST_REPEATS
    assert "timing 1 rows: the best of 40 calls differ by 21 %" in caplog.text


def test_a_slow_server_takes_a_multiple_of_what_the_routes_took_at_best(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(calibrate.time, "sleep", slept.append)  # type: ignore[attr-defined]
    pace = Pace.parse("factor=4")
    slots = torch.tensor([[0, 1, -1, 2]])
    pace.hold(slots, perf_counter() - 0.3)
    assert slept[-1] == pytest.approx(0.9, abs=0.05)
    # The same routes, disturbed: they took twice as long, and are held as long as before, all in all.
    pace.hold(slots, perf_counter() - 0.6)
    assert slept[-1] == pytest.approx(0.6, abs=0.05)
    # One route takes a third of three.
    pace.hold(torch.tensor([[5, -1, -1, -1]]), perf_counter() - 0.1)
    assert slept[-1] == pytest.approx(0.3, abs=0.05)


def test_only_what_is_asked_for_is_slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"slept {seconds}"))
    assert not Pace().slows
    pace = Pace.parse("above=4:8")
    assert pace.slows
    pace.hold(torch.zeros(4, 2, dtype=torch.int64), perf_counter() - 0.1)


@pytest.mark.parametrize("text", ["", "fast", "factor=x", "factor=2,speed=1"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="allowed is"):
        Pace.parse(text)
