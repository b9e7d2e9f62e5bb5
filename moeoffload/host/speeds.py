"""How fast servers are, measured, and the speeds by which experts are therefore placed.

Parts in proportion to speed make servers busy for the same time over many rows. A single row chooses experts by chance
and waits for the last server, so slower servers get a bit less than their part.

Times are measured on machines that do other work, too. So servers count as equally fast unless they clearly differ, and
the others' speeds are rounded to a coarse scale: the same servers get the same experts on another day, and with them
the same rounding of sums.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

logger = logging.getLogger(__name__)

Timings = Sequence[tuple[int, float]]
"""Rows and seconds of calls of some sizes."""

Measure = Callable[[], Timings]
"""Times calls of some sizes on one server: the shortest times that it has seen so far."""

STABLE: Final = 1.15
"""Two rounds of timing agree if no time of the first is more than this factor above that of the second."""
MOST_ROUNDS: Final = 4
DOUBT_S: Final = 1.5
"""Servers that seem to differ are timed on for so long: other work on a machine slows one of them down for seconds."""
EQUAL: Final = 1.36
"""Servers whose times differ by less are equal: two times of one server, each wrong by 15 %, differ by 1.15 / 0.85."""
STEPS_PER_OCTAVE: Final = 2
"""Larger factors are rounded to powers of two and the middles between them."""
POWER: Final = 1.2
"""A server that takes f times as long gets 1 / f**POWER of the fastest one's part. Where f is 4, that is about the best
for calls of 1 to 256 rows together: many rows take 5 % longer than with even parts, and few rows less."""


def measure(servers: Sequence[Measure], names: Sequence[str]) -> tuple[list[Timings], float]:
    """Timings of each server, and below which factor they are to count as equal, see `slowness`.

    Servers are timed one after the other, since they may share a device, and in rounds, so that a moment in which the
    machine was busy does not make one of them slow; those that seem to differ for some time, before it is believed.
    Where rounds go on to differ, that is logged, and servers that differ by less than the rounds did count as equal.
    Raises ServerError: a server cannot be timed.
    """
    best: list[dict[int, float]] = [{} for _ in servers]
    started, n_rounds, is_done = perf_counter(), 0, False
    while not is_done:
        spread = 1.0
        for known, server in zip(best, servers, strict=True):
            for rows, seconds in server():
                spread = max(spread, known.get(rows, seconds) / seconds)
                known[rows] = min(known.get(rows, seconds), seconds)
        n_rounds += 1
        timings: list[Timings] = [sorted(known.items()) for known in best]
        equal = max(EQUAL, spread)
        is_settled = n_rounds >= MOST_ROUNDS or (n_rounds > 1 and spread <= STABLE)
        are_equal = max(slowness(timings, equal)) == 1
        is_done = is_settled and (are_equal or perf_counter() - started >= DOUBT_S)
    if spread > STABLE:
        logger.warning("times of expert servers vary by a factor of %.2f: others use their machines, too", spread)
    for name, known in zip(names, best, strict=True):
        row_us = 1e6 * sum(seconds / rows for rows, seconds in known.items()) / len(known)
        logger.info("expert server %s: %.3g us per row", name, row_us)
    return timings, equal


def slowness(timings: Sequence[Timings], equal: float = EQUAL) -> list[float]:
    """How many times longer than the fastest server each server takes, rounded as the module says; 1 for the fastest.

    The sizes that all have are compared, each counting the same; factors below ``equal`` are 1.
    """
    sizes = set.intersection(*({rows for rows, _ in each} for each in timings))
    times = [[s / rows for rows, s in each if not sizes or rows in sizes] for each in timings]
    usual = [math.exp(sum(map(math.log, each)) / len(each)) for each in times]
    factors = [each / min(usual) for each in usual]
    return [1.0 if f < equal else 2 ** (round(STEPS_PER_OCTAVE * math.log2(f)) / STEPS_PER_OCTAVE) for f in factors]


def placement_speeds(timings: Sequence[Timings], equal: float = EQUAL) -> list[float]:
    """Speeds of servers, the fastest 1, for `moeoffload.placement.place_experts`; arguments as for `slowness`."""
    return [float(factor**-POWER) for factor in slowness(timings, equal)]
