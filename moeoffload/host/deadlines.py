"""How long a dispatch may take: a multiple of the time that recent dispatches took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

LATE_FACTOR: Final = 8.0
"""A deadline is this multiple of the longest recent wait, or of the predicted time of all slots if that is longer."""
RECENT: Final = 0.98
"""Each reply decays the longest recent wait by this factor."""


class Deadlines:
    """The deadlines of dispatches to one server. All times in seconds."""

    def __init__(self, floor_s: float, ceiling_s: float, n_slots: int, timings: Sequence[tuple[int, float]]) -> None:
        """``n_slots`` requests may be in flight; ``timings`` are the (rows, seconds) of calls that the server timed."""
        self.ceiling_s = ceiling_s
        self._floor_s = floor_s
        self._n_slots = n_slots
        self._timings = sorted(timings) or [(1, 0.0)]
        self._predicted_s: dict[int, float] = {}
        self._longest_s = 0.0
        """The longest recent wait; it decays with each reply."""

    def of(self, n_rows: int) -> float:
        """Returns the deadline of a dispatch of ``n_rows``, with room for this host's other dispatches before it."""
        predicted = self._predicted_s.get(n_rows)
        if predicted is None:
            predicted = self._predicted_s[n_rows] = self._predict(n_rows)
        return min(self.ceiling_s, max(self._floor_s, LATE_FACTOR * max(self._longest_s, self._n_slots * predicted)))

    def waited(self, seconds: float) -> None:
        """Records how long the host waited for one reply."""
        self._longest_s = max(seconds, RECENT * self._longest_s)

    def _predict(self, n_rows: int) -> float:
        rows, seconds = zip(*self._timings, strict=True)
        return float(np.interp(n_rows, rows, seconds)) * max(1.0, n_rows / rows[-1])
