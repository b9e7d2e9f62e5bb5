"""By what speeds experts are placed: about even work, less for a slow server where single rows would wait for it."""

from __future__ import annotations

import math

import pytest

from moeoffload.host.speeds import MOST_TO_MEAN, Timings, placement_speeds

TOP_K = 8


def timings(factor: float) -> Timings:
    """A server that takes ``factor`` times as long as the fast one."""
    sizes = {1: 1.9e-3, 4: 6e-3, 16: 14e-3, 64: 30e-3, 256: 60e-3}
    return [(rows, factor * seconds) for rows, seconds in sizes.items()]


def shares(*factors: float) -> list[float]:
    speeds = placement_speeds([timings(factor) for factor in factors], TOP_K)
    return [speed / sum(speeds) for speed in speeds]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_equal_servers_get_equal_parts(n: int) -> None:
    assert shares(*[1.0] * n) == pytest.approx([1 / n] * n)


@pytest.mark.parametrize("factors", [(1, 4), (4, 1), (1, 1, 4), (1, 4, 4), (1, 1.5, 3), (1, 50)])
def test_a_slow_server_gets_less_than_its_part_and_stays_about_as_busy(factors: tuple[float, ...]) -> None:
    parts = shares(*factors)
    even = [1 / factor / sum(1 / each for each in factors) for factor in factors]
    slowest, fastest = factors.index(max(factors)), factors.index(min(factors))
    assert 0 < parts[slowest] < even[slowest]
    assert parts[fastest] > even[fastest]
    busy = [part * factor for part, factor in zip(parts, factors, strict=True)]
    assert max(busy) <= MOST_TO_MEAN * sum(busy) / len(busy) + 1e-9


def test_the_order_of_servers_does_not_matter() -> None:
    assert shares(1, 2, 4) == pytest.approx(list(reversed(shares(4, 2, 1))))


def test_many_routes_need_no_correction() -> None:
    """With hundreds of experts for each row, what one server gets is hardly a matter of chance."""
    slow = placement_speeds([timings(1), timings(4)], 4096)
    few = placement_speeds([timings(1), timings(4)], 1)
    assert slow[0] / slow[1] <= few[0] / few[1]
    assert slow[0] / slow[1] == pytest.approx(4, rel=0.15)


def test_servers_that_were_timed_at_different_sizes_are_compared_at_those_both_have() -> None:
    small = timings(1)[:3]  # its batch capacity is 16
    speeds = placement_speeds([small, timings(4)], TOP_K)
    assert all(math.isfinite(speed) and speed > 0 for speed in speeds)
    assert speeds[0] > speeds[1]


def test_servers_without_a_common_size_are_compared_by_what_there_is() -> None:
    assert placement_speeds([[(1, 1e-3)], [(4, 8e-3)]], TOP_K) == pytest.approx([1000, 500])
