"""How long a dispatch may take: some times as long as others took lately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

LATE_FACTOR: Final = 8.0
"""A dispatch may take so many times what recent ones of its size took."""
RECENT: Final = 0.98
"""How much of the longest recent wait each reply leaves."""


class Deadlines:
    """Those of the dispatches to one server. All times in seconds."""

    def __init__(self, floor_s: float, ceiling_s: float, n_slots: int, timings: Sequence[tuple[int, float]]) -> None:
        """``n_slots`` requests may be in flight; ``timings`` are (rows, seconds) of calls that the server has timed."""
        self.ceiling_s = ceiling_s
        self._floor_s = floor_s
        self._n_slots = n_slots
        self._timings = sorted(timings) or [(1, 0.0)]
        self._predicted_s: dict[int, float] = {}
        self._longest_s = 0.0
        """Of the last waits, forgotten slowly."""

    def of(self, n_rows: int) -> float:
        """The deadline of a dispatch of so many rows: other ones of this host may be before it."""
        predicted = self._predicted_s.get(n_rows)
        if predicted is None:
            predicted = self._predicted_s[n_rows] = self._predict(n_rows)
        return min(self.ceiling_s, max(self._floor_s, LATE_FACTOR * max(self._longest_s, self._n_slots * predicted)))

    def waited(self, seconds: float) -> None:
        """Takes one wait for a reply into account."""
        self._longest_s = max(seconds, RECENT * self._longest_s)

    def _predict(self, n_rows: int) -> float:
        rows, seconds = zip(*self._timings, strict=True)
        return float(np.interp(n_rows, rows, seconds)) * max(1.0, n_rows / rows[-1])
