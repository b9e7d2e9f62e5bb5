"""By what speeds experts are placed: equal for equal servers, whatever the noise; less for a slow server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeoffload.host.speeds import EQUAL, MOST_ROUNDS, POWER, Timings, measure, placement_speeds, slowness
from moeoffload.placement import MemoryOffer, place_experts

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
    calm = [_Busy(1.0), _Busy(4.0, 4.3)]
    measure(calm, ["a", "b"])
    assert [server.n_rounds for server in calm] == [2, 2]


def test_times_that_never_agree_make_servers_equal_that_differ_by_less(caplog: pytest.LogCaptureFixture) -> None:
    restless = _Busy(8.0, 4.0, 2.0, 1.0)
    found, equal = measure([_Busy(0.6), restless], ["a", "b"])
    assert restless.n_rounds == MOST_ROUNDS
    assert "vary by a factor of 2.00" in caplog.text
    assert placement_speeds(found, equal) == [1, 1]
