"""Measures how fast servers are: all of them in turn, again and again until two rounds agree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from moeoffload.host.speeds import EQUAL, Timings

logger = logging.getLogger(__name__)

STABLE: Final = 1.15
"""Two rounds agree if no time of the first is more than this factor above that of the second."""
MOST_ROUNDS: Final = 4

Measure = Callable[[], Timings]
"""Times calls of some sizes on one server: the shortest times that it has seen so far."""


def measure(servers: Sequence[Measure], names: Sequence[str]) -> tuple[list[Timings], float]:
    """Timings of each server, and below which factor they are to count as equal, see `speeds.slowness`.

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
