"""How fast servers are, measured, and the speeds by which experts are therefore placed.

Parts in proportion to speed make servers busy for the same time over many rows. A single row chooses experts by chance
and waits for the last server, so slower servers get less than their part: as far as that shortens calls of few rows
more than it lengthens those of many, and as far as all stay about equally busy.

Times are measured on machines that do other work, too. So servers count as equally fast unless they clearly differ, and
the others' speeds are rounded to a coarse scale: the same servers get the same experts on another day, and with them
the same rounding of sums.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Timings = Sequence[tuple[int, float]]
"""Rows and seconds of calls of some sizes."""

Measure = Callable[[], Timings]
"""Times calls of some sizes on one server: the shortest times that it has seen so far."""

STABLE: Final = 1.15
"""Two rounds of timing agree if no time of the first is more than this factor above that of the second."""
MOST_ROUNDS: Final = 4
EQUAL: Final = 1.36
"""Servers whose times differ by less are equal: two times of one server, each wrong by 15 %, differ by 1.15 / 0.85."""
STEPS_PER_OCTAVE: Final = 2
"""Larger factors are rounded to powers of two and the middles between them."""
MOST_TO_MEAN: Final = 1.15
"""How long the busiest server may be busy, relative to the mean, for the sake of calls of few rows."""
FRAME_S: Final = 50e-6
"""What one more server costs each call on the host, in seconds."""
_POWERS: Final = np.linspace(1.0, 2.0, 41)
_SAMPLES: Final = 2048


def measure(servers: Sequence[Measure], names: Sequence[str]) -> tuple[list[Timings], float]:
    """Timings of each server, and below which factor they are to count as equal, see `slowness`.

    Servers are timed one after the other, since they may share a device, and in rounds, so that a moment in which the
    machine was busy does not make one of them slow. Where rounds go on to differ, that is logged, and servers that
    differ by less than the rounds did count as equal.

    Raises:
        ServerError: a server cannot be timed.
    """
    best: list[dict[int, float]] = [{} for _ in servers]
    spread = 1.0
    for number in range(MOST_ROUNDS):
        spread = 1.0
        for known, server in zip(best, servers, strict=True):
            for rows, seconds in server():
                spread = max(spread, known.get(rows, seconds) / seconds)
                known[rows] = min(known.get(rows, seconds), seconds)
        if number and spread <= STABLE:
            break
    else:
        logger.warning("times of expert servers vary by a factor of %.2f: others use their machines, too", spread)
    for name, known in zip(names, best, strict=True):
        row_us = 1e6 * sum(seconds / rows for rows, seconds in known.items()) / len(known)
        logger.info("expert server %s: %.3g us per row", name, row_us)
    return [sorted(known.items()) for known in best], max(EQUAL, spread)


def slowness(timings: Sequence[Timings], equal: float = EQUAL) -> list[float]:
    """How many times longer than the fastest server each server takes, rounded as the module says; 1 for the fastest.

    Args:
        timings: of each server, positive. The sizes that all of them have are compared, each counting the same.
        equal: factors below this one are 1.
    """
    sizes = _common_sizes(timings)
    times = [[s / rows for rows, s in each if not sizes or rows in sizes] for each in timings]
    usual = [math.exp(sum(map(math.log, each)) / len(each)) for each in times]
    factors = [each / min(usual) for each in usual]
    return [1.0 if f < equal else 2 ** (round(STEPS_PER_OCTAVE * math.log2(f)) / STEPS_PER_OCTAVE) for f in factors]


def placement_speeds(timings: Sequence[Timings], top_k: int, equal: float = EQUAL) -> list[float]:
    """Speeds of servers, the fastest 1, for `moeoffload.placement.place_experts`.

    They are powers of the inverse of `slowness`: the power, 1 to 2, is the one for which calls of all sizes together
    take the least time, each size relative to the best that one server does alone. What a call takes is found by
    drawing routes, always the same ones.

    Args:
        timings: as for `slowness`.
        top_k: experts of a row.
        equal: as for `slowness`.
    """
    slow = np.array(slowness(timings, equal))
    if slow.max() == 1:
        return [1.0] * len(slow)
    fastest = dict(timings[int(slow.argmin())])
    # Rounded, too, so that noise does not choose the power.
    route_s = {rows: 2 ** round(math.log2(fastest[rows] / (rows * top_k))) for rows in _common_sizes(timings)}

    ordered = np.sort(slow)  # draws would differ with the order of servers

    def total_time(power: float) -> float:
        if _most_to_mean(ordered, power) > MOST_TO_MEAN:
            return math.inf
        return sum(_relative_time(rows * top_k, s * ordered, ordered**-power) for rows, s in sorted(route_s.items()))

    return [float(speed) for speed in slow ** -min(_POWERS, key=total_time)]


def _common_sizes(timings: Sequence[Timings]) -> set[int]:
    """The row counts that all servers were timed with."""
    return set.intersection(*({rows for rows, _ in each} for each in timings))


def _most_to_mean(slow: NDArray[np.float64], power: float) -> float:
    """How long the busiest server is busy over many rows, relative to the mean."""
    busy = slow ** (1 - power)
    return float(busy.max() / busy.mean()) - 1e-9


def _relative_time(n_routes: int, seconds: NDArray[np.float64], speeds: NDArray[np.float64]) -> float:
    """Time of a call of so many routes, as a multiple of what the best server alone takes.

    ``seconds`` (n_servers,) is what a route takes on each server; ``speeds`` (n_servers,) shares the routes out.
    """
    draws = np.random.default_rng(n_routes).multinomial(n_routes, speeds / speeds.sum(), _SAMPLES)
    frames_s = FRAME_S * ((draws > 0).sum(axis=1) - 1)
    return float(((draws * seconds).max(axis=1) + frames_s).mean() / (n_routes * seconds.min()))
