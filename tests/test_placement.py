"""Servers are timed as a run will use them; by that each expert gets one owner, within memory, whatever the noise."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeoffload.errors import PlacementError
from moeoffload.expert_server import calibrate
from moeoffload.expert_server.calibrate import best_rows, time_layer
from moeoffload.host import speeds
from moeoffload.host.link import Deadlines
from moeoffload.host.speeds import EQUAL, MOST_ROUNDS, POWER, Timings, measure, placement_speeds, slowness
from moeoffload.kernels import KernelInput, KernelWorkspace
from moeoffload.placement import ExpertTable, MemoryOffer, choose_local, fair_shares, place_experts


def offers_of(*sizes: int) -> list[MemoryOffer]:
    return [MemoryOffer(f"10.0.0.{i}:50051", size) for i, size in enumerate(sizes)]


def place(
    counts: list[int], sizes: list[int], offers: list[MemoryOffer], speeds: list[float] | None = None
) -> list[ExpertTable]:
    return place_experts([range(count) for count in counts], sizes, offers, speeds)


@given(
    usage=st.lists(st.lists(st.integers(0, 500), min_size=24, max_size=24), min_size=1, max_size=5),
    offered=st.lists(st.integers(0, 6000), min_size=1, max_size=4),
    speeds=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    size=st.integers(1, 100),
    known=st.booleans(),
)
def test_every_expert_has_one_owner_and_no_server_more_than_it_offered(
    usage: list[list[int]], offered: list[int], speeds: list[float], size: int, known: bool
) -> None:
    sizes, experts = [size] * len(usage), [range(24)] * len(usage)
    how = (speeds[: len(offered)], usage) if known else ()
    try:
        tables = place_experts(experts, sizes, offers_of(*offered), *how)
    except PlacementError:
        assert sum(n // size for n in offered) < 24 * len(usage)
        return
    for layer in range(len(usage)):
        assert sorted(expert for table in tables for expert in table.layers[layer]) == list(range(24))
        for table in () if known else tables:  # each has a range
            assert list(table.layers[layer]) == list(range(24))[slice(*ends(table.layers[layer]))]
    for table, limit in zip(tables, offered, strict=True):
        assert sum(len(held) * size for held in table.layers) <= limit


def ends(held: tuple[int, ...]) -> tuple[int, int]:
    return (held[0], held[-1] + 1) if held else (0, 0)


def test_servers_with_enough_memory_get_equal_parts_of_every_layer() -> None:
    tables = place([128] * 4, [100] * 4, offers_of(10**9, 10**6, 10**7))
    for layer in range(4):
        parts = [len(table.layers[layer]) for table in tables]
        assert max(parts) - min(parts) <= 1
    assert max(table.n_experts for table in tables) - min(table.n_experts for table in tables) <= 2


def test_a_small_server_gets_what_it_holds_and_the_others_share_the_rest() -> None:
    tables = place([100] * 2, [10] * 2, offers_of(400, 10**6, 10**6))
    assert [table.n_experts for table in tables] == [40, 80, 80]


def test_statistics_make_servers_finish_at_the_same_time() -> None:
    usage = [[1000 // (rank + 1) for rank in range(64)], [1000 // (64 - rank) for rank in range(64)]]
    speeds = [4.0, 1.0, 2.0]
    tables = place_experts([range(64)] * 2, [10] * 2, offers_of(10**6, 10**6, 10**6), speeds, usage)
    for layer, counts in enumerate(usage):
        times = [
            sum(counts[e] for e in table.layers[layer]) / speed for table, speed in zip(tables, speeds, strict=True)
        ]
        assert max(times) <= 1.1 * sum(times) / 3


def test_servers_that_get_nothing_need_no_statistics() -> None:
    tables = place_experts([()] * 2, [10] * 2, offers_of(100, 100), None, [[1] * 8] * 2)
    assert [table.n_experts for table in tables] == [0, 0]


def test_what_does_not_fit_is_told_as_a_table() -> None:
    with pytest.raises(PlacementError) as error:
        place([128], [1 << 30], offers_of(60 << 30, 20 << 30))
    lines = str(error.value).splitlines()
    assert "do not fit" in lines[0]
    table = {line.split()[0]: float(line.split()[1]) for line in lines[1:]}
    assert table == {"needed": 128, "10.0.0.0:50051": 60, "10.0.0.1:50051": 20, "offered": 80, "missing": 48}


def test_equal_tables_have_equal_digests_and_others_do_not() -> None:
    first, second = place([8], [1], offers_of(100, 100))
    again, _ = place([8], [1], offers_of(100, 100))
    assert first.digest == again.digest != second.digest


def test_shares_follow_the_speeds_within_the_memory() -> None:
    tables = place([100] * 3, [10] * 3, offers_of(10**6, 10**6), [4.0, 1.0])
    assert [table.n_experts for table in tables] == [240, 60]
    tables = place([100] * 3, [10] * 3, offers_of(1500, 10**6), [4.0, 1.0])
    assert [table.n_experts for table in tables] == [150, 150]


@given(need=st.floats(0, 1000), limits=st.lists(st.floats(0, 1000), min_size=1, max_size=5), data=st.data())
def test_fair_shares_add_up_and_respect_limits(need: float, limits: list[float], data: st.DataObject) -> None:
    speeds = data.draw(st.lists(st.floats(0.01, 100), min_size=len(limits), max_size=len(limits)))
    shares = fair_shares(need, limits, speeds)
    assert all(0 <= share <= limit * (1 + 1e-9) for share, limit in zip(shares, limits, strict=True))
    assert abs(sum(shares) - min(need, sum(limits))) <= 1e-6 * max(1, need)


def test_the_most_used_experts_stay_on_the_host() -> None:
    usage = [[5, 1, 9, 1], [2, 8, 0, 7]]
    assert choose_local([4, 4], [10, 10], 40, usage).layers == ((2, 0)[::-1], (1, 3))
    assert choose_local([4, 4], [10, 10], 49).layers == ((0, 1), (0, 1))
    assert choose_local([4, 4], [10, 10], 9).n_experts == 0
    assert choose_local([4, 4], [10, 10], 1000).n_experts == 8
    rest = [expert for expert in range(4) if expert not in choose_local([4, 4], [10, 10], 40, usage).layers[0]]
    assert sorted(e for table in place_experts([rest], [1], offers_of(9, 9)) for e in table.layers[0]) == rest == [1, 3]


SIZES = {1: 1.9e-3, 4: 6e-3, 16: 14e-3, 64: 30e-3, 256: 60e-3}


def timings(factor: float) -> Timings:
    """A server that takes ``factor`` times as long as the fast one."""
    return [(rows, factor * seconds) for rows, seconds in SIZES.items()]


def shares(*factors: float) -> list[float]:
    speeds = placement_speeds([timings(factor) for factor in factors])
    return [speed / sum(speeds) for speed in speeds]


noise = st.lists(st.floats(0.85, 1.15), min_size=len(SIZES), max_size=len(SIZES))


@given(noises=st.lists(noise, min_size=2, max_size=5))
def test_noise_never_changes_the_placement_of_equal_servers(noises: list[list[float]]) -> None:
    noisy = [[(rows, s * n) for (rows, s), n in zip(SIZES.items(), each, strict=True)] for each in noises]
    speeds = placement_speeds(noisy)
    assert speeds == [1.0] * len(noises)
    offers = [MemoryOffer(str(number), 10**6) for number in range(len(noises))]
    assert place_experts([range(128)] * 4, [10] * 4, offers, speeds) == place_experts(
        [range(128)] * 4, [10] * 4, offers
    )


@given(noises=st.lists(noise, min_size=2, max_size=2), factor=st.sampled_from([2.0, 4.0, 8.0]))
def test_a_server_of_half_the_speed_is_one_whatever_the_noise_of_each_size(
    noises: list[list[float]], factor: float
) -> None:
    # Independent noise averages out; what is left is far below a step of the scale.
    even = [[n / (sum(each) / len(each)) for n in each] for each in noises]
    noisy = [
        [(rows, f * s * n) for (rows, s), n in zip(SIZES.items(), each, strict=True)]
        for f, each in zip((1, factor), even, strict=True)
    ]
    assert slowness(noisy) == [1.0, factor]


@pytest.mark.parametrize("factors", [(1, 4), (4, 1), (1, 1, 4), (1, 4, 4), (1, 1.5, 3), (1, 50)])
def test_a_slow_server_gets_less_than_its_part_and_stays_about_as_busy(factors: tuple[float, ...]) -> None:
    parts, slow = shares(*factors), slowness([timings(factor) for factor in factors])
    even = [1 / each / sum(1 / other for other in slow) for each in slow]
    slowest, fastest = slow.index(max(slow)), slow.index(min(slow))
    assert 0 < parts[slowest] < even[slowest]
    assert parts[fastest] > even[fastest]
    assert parts[fastest] < 1.1 * even[fastest], "many rows do not take much longer for it"
    assert shares(*reversed(factors)) == pytest.approx(parts[::-1])


def test_only_sizes_that_all_servers_were_timed_at_are_compared() -> None:
    assert slowness([timings(1)[:3], timings(4)]) == [1, 4]  # the batch capacity of one is 16
    assert slowness([[(1, 1e-3)], [(4, 8e-3)]]) == [1, 2]
    assert placement_speeds([[(1, 1e-3)], [(4, 8e-3)]]) == pytest.approx([1, 2**-POWER])


class _Busy:
    """A server whose times are multiplied by what other work on its machine costs; the last factor stays."""

    def __init__(self, *factors: float) -> None:
        self.factors = list(factors)
        self.n_rounds = 0

    def __call__(self) -> Timings:
        self.n_rounds += 1
        return timings(self.factors[min(self.n_rounds, len(self.factors)) - 1])


def test_servers_are_timed_until_two_rounds_agree() -> None:
    quiet, disturbed = _Busy(1.0), _Busy(3.0, 1.0, 1.1)
    found, equal = measure([quiet, disturbed], ["a", "b"])
    assert quiet.n_rounds == disturbed.n_rounds == 3
    assert found == [timings(1), timings(1)]
    assert equal == EQUAL
    calm = [_Busy(1.0), _Busy(1.1, 1.2)]
    measure(calm, ["a", "b"])
    assert [server.n_rounds for server in calm] == [2, 2]


def test_servers_that_differ_are_timed_for_longer_before_it_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(speeds, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(speeds, "DOUBT_S", 6)
    beside_other_work = [_Busy(1.0), _Busy(4.0, 4.0, 4.0, 4.0, 1.0)]
    assert placement_speeds(*measure(beside_other_work, ["a", "b"])) == [1, 1]
    slow = [_Busy(1.0), _Busy(4.0)]
    assert max(slowness(*measure(slow, ["a", "b"]))) == 4
    assert slow[0].n_rounds == slow[1].n_rounds > MOST_ROUNDS


def test_times_that_never_agree_make_servers_equal_that_differ_by_less(caplog: pytest.LogCaptureFixture) -> None:
    restless = _Busy(8.0, 4.0, 2.0, 1.0)
    found, equal = measure([_Busy(0.6), restless], ["a", "b"])
    assert restless.n_rounds == MOST_ROUNDS
    assert "vary by a factor of 2.00" in caplog.text
    assert placement_speeds(found, equal) == [1, 1]


HIDDEN = 8


class Recorded:
    """Stands for a layer with 6 of 24 experts here; keeps the slots that it is called with."""

    hidden, dtype, n_experts = HIDDEN, torch.float32, 6

    def __init__(self) -> None:
        self.calls: list[torch.Tensor] = []

    def __call__(self, call: KernelInput, workspace: KernelWorkspace) -> None:
        assert call.rows.shape == (call.slots.shape[0], HIDDEN)
        self.calls.append(call.slots)


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

    def __call__(self, call: KernelInput, workspace: KernelWorkspace) -> None:
        super().__call__(call, workspace)
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


@pytest.mark.parametrize(
    ("row_us", "most", "best"),
    [
        ({1024: 1.0, 2048: 0.9, 4096: 0.8}, 4096, 4096),
        ({1024: 1.0, 2048: 0.9, 4096: 0.89}, 4096, 2048),  # 1 % is not worth the memory
        ({1024: 1.0, 2048: 0.96, 4096: 0.1}, 4096, 1024),  # not tried any more
        ({1024: 1.0, 2048: 0.9, 3000: 0.8}, 3000, 3000),
        ({1024: 1.0, 2047: 0.99}, 2047, 1024),
        ({1024: 1.0}, 1024, 1024),
        ({1024: 1.0, 2048: None}, 4096, 1024),  # out of memory
        ({700: 1.0}, 700, 700),
    ],
)
def test_larger_calls_are_offered_where_they_pay(row_us: dict[int, float | None], most: int, best: int) -> None:
    tried = []

    def seconds(rows: int) -> float:
        tried.append(rows)
        us = row_us[rows]
        if us is None:
            raise torch.OutOfMemoryError("out of memory")
        return us * rows / 1e6

    assert best_rows(seconds, 1024, most) == best
    assert tried == sorted(tried)
