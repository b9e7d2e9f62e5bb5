"""Measures how fast servers are, and derives the speeds by which experts are placed.

Over many rows, shares in proportion to speed keep all servers busy for the same time. A single row chooses experts at
random and waits for the last server, so slower servers get a bit less than their proportional share.

The machines may do other work during the measurement. So servers count as equally fast unless they clearly differ, and
other speeds are rounded to a coarse scale: the same servers then get the same experts in every run, and their sums the
same rounding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

logger = logging.getLogger(__name__)

Timings = Sequence[tuple[int, float]]
"""(rows, seconds) of calls of several sizes."""

Measure = Callable[[], Timings]
"""Times calls of several sizes on one server; returns the shortest times that the server has seen so far."""

STABLE: Final = 1.15
"""Two rounds of timing agree if no time of the first is more than this factor above that of the second."""
MOST_ROUNDS: Final = 4
DOUBT_S: Final = 1.5
"""Servers that seem to differ are timed for at least this long: other work can slow a machine down for seconds."""
EQUAL: Final = 1.36
"""Servers whose times differ by a smaller factor count as equal: two times of one server, each wrong by 15 %, differ by
1.15 / 0.85."""
STEPS_PER_OCTAVE: Final = 2
"""Larger factors are rounded to powers of two and the geometric means between them."""
POWER: Final = 1.2
"""A server that takes f times as long gets 1 / f**POWER of the fastest one's share. For f = 4 this is about the best
compromise for calls of 1 to 256 rows: many rows take 5 % longer than with proportional shares, few rows less time."""


def measure(servers: Sequence[Measure], names: Sequence[str]) -> tuple[list[Timings], float]:
    """Returns the timings of each server, and the factor below which servers count as equal, see `slowness`.

    Servers are timed one after the other, since they may share a device, and in rounds, so that a short burst of other
    work does not make one of them look slow. If they seem to differ, timing goes on for at least DOUBT_S. If rounds
    keep differing, that is logged, and servers that differ by less than the rounds did count as equal.
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
    """Returns how many times longer than the fastest server each server takes, rounded to the module's scale.

    Compares the sizes that all servers have, with equal weight; factors below ``equal`` become 1.
    """
    sizes = set.intersection(*({rows for rows, _ in each} for each in timings))
    times = [[s / rows for rows, s in each if not sizes or rows in sizes] for each in timings]
    usual = [math.exp(sum(map(math.log, each)) / len(each)) for each in times]
    factors = [each / min(usual) for each in usual]
    return [1.0 if f < equal else 2 ** (round(STEPS_PER_OCTAVE * math.log2(f)) / STEPS_PER_OCTAVE) for f in factors]


def placement_speeds(timings: Sequence[Timings], equal: float = EQUAL) -> list[float]:
    """Returns server speeds, 1 for the fastest, for `placement.place_experts`; arguments as for `slowness`."""
    return [float(factor**-POWER) for factor in slowness(timings, equal)]
