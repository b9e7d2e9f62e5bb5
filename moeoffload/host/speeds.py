"""From what calls take on each server to the speeds by which experts are placed.

Parts in proportion to speed make servers busy for the same time over many rows. A row alone chooses experts by chance,
and waits for the last server: two more of its experts on a server four times slower, and the step takes longer than
without that server. So slower servers get less than their part, as far as that shortens calls of few rows more than it
lengthens those of many, and as far as all stay about equally busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Timings = Sequence[tuple[int, float]]
"""Rows and seconds of calls of some sizes."""

MOST_TO_MEAN: Final = 1.15
"""How long the busiest server may be busy, relative to the mean, for the sake of calls of few rows."""
FRAME_S: Final = 50e-6
"""What one more server costs each call on the host, in seconds."""
_STEPS: Final = 41
_LARGEST_POWER: Final = 2.0
_SAMPLES: Final = 2048


def per_row(timings: Timings) -> float:
    """Seconds of a row on a server; every size counts the same, since decode and prefill share the placement."""
    return sum(seconds / rows for rows, seconds in timings) / len(timings)


def placement_speeds(timings: Sequence[Timings], top_k: int) -> list[float]:
    """Speeds of servers, in any common unit, for `moeoffload.placement.place_experts`.

    They are powers of rows per second: the power, 1 or more, is the one for which calls of all sizes together take the
    least time, each size relative to the best that one server does alone. What a call takes is found by drawing routes.

    Args:
        timings: of each server, positive; only sizes that all of them have tell how calls vary.
        top_k: experts of a row.
    """
    plain = np.array([1 / per_row(each) for each in timings])
    if len(plain) < 2:
        return list(plain)
    sizes = sorted(set.intersection(*({rows for rows, _ in each} for each in timings)))
    seconds = np.array([[dict(each)[rows] / (rows * top_k) for each in timings] for rows in sizes])
    best, best_time = plain, float("inf")
    for power in np.linspace(1.0, _LARGEST_POWER, _STEPS):
        speeds = plain**power
        busy = speeds / plain
        if busy.max() > MOST_TO_MEAN * busy.mean():
            break
        time = sum(_relative_time(rows * top_k, each, speeds) for rows, each in zip(sizes, seconds, strict=True))
        if time < best_time:
            best, best_time = speeds, time
    return list(best)


def _relative_time(n_routes: int, seconds: NDArray[np.float64], speeds: NDArray[np.float64]) -> float:
    """Time of a call of so many routes, as a multiple of what the best server alone takes.

    ``seconds`` (n_servers,) is what a route takes on each server; ``speeds`` (n_servers,) shares the routes out.
    """
    draws = np.random.default_rng(n_routes).multinomial(n_routes, speeds / speeds.sum(), _SAMPLES)
    frames_s = FRAME_S * ((draws > 0).sum(axis=1) - 1)
    return float(((draws * seconds).max(axis=1) + frames_s).mean() / (n_routes * seconds.min()))
