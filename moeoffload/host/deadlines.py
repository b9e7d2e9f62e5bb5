"""How long a dispatch may take: some times as long as others took lately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeoffload.host.auto_slice import SliceLearner

PATIENCE: Final = 8.0
"""A dispatch may take so many times what recent ones of its size took."""
FEW_ROWS: Final = 16
"""Deadlines for up to so many rows are worked out one call ahead, when the host waits anyway."""
RECENT: Final = 0.98
"""How much of the longest recent wait each reply leaves."""


@dataclass(frozen=True, slots=True)
class DeadlineBounds:
    """What no deadline is below, and none above, in seconds."""

    floor_s: float
    ceiling_s: float


class Deadlines:
    """Those of the dispatches to one server. All times in seconds."""

    def __init__(self, bounds: DeadlineBounds, n_slots: int, learner: SliceLearner) -> None:
        """``n_slots`` requests may be in flight; ``learner`` knows how long rows take."""
        self.ceiling_s = bounds.ceiling_s
        self._floor_s = bounds.floor_s
        self._n_slots = n_slots
        self._learner = learner
        self._longest_s = 0.0
        """Of the last waits, forgotten slowly."""
        self._of_few: dict[int, float] = {}

    def work_out(self, n_rows: int) -> float:
        """The deadline of a dispatch of so many rows: other ones of this host may be before it."""
        usual = max(self._longest_s, self._n_slots * self._learner.seconds(n_rows))
        return min(self.ceiling_s, max(self._floor_s, PATIENCE * usual))

    def of(self, n_rows: int) -> float:
        """As `work_out`, or as it was when `prepare` was called last."""
        return self._of_few.get(n_rows) or self.work_out(n_rows)

    def prepare(self, n_rows: int) -> None:
        """Works out the deadline of the next dispatch of so many rows, if these are few."""
        if n_rows <= FEW_ROWS:
            self._of_few[n_rows] = self.work_out(n_rows)

    def waited(self, seconds: float) -> None:
        """Takes one wait for a reply into account."""
        self._longest_s = max(seconds, RECENT * self._longest_s)
