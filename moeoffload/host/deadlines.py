"""How long a dispatch may take: some times as long as others took lately."""

from __future__ import annotations

from typing import Final

from moeoffload.host.auto_slice import SliceLearner

PATIENCE: Final = 8.0
"""A dispatch may take so many times what recent ones of its size took."""
RECENT: Final = 0.98
"""How much of the longest recent wait each reply leaves."""


class Deadlines:
    """Those of the dispatches to one server. All times in seconds."""

    def __init__(self, floor_s: float, ceiling_s: float, n_slots: int, learner: SliceLearner) -> None:
        """``n_slots`` requests may be in flight; ``learner`` knows how long rows take."""
        self.ceiling_s = ceiling_s
        self._floor_s = floor_s
        self._n_slots = n_slots
        self._learner = learner
        self._longest_s = 0.0
        """Of the last waits, forgotten slowly."""

    def of(self, n_rows: int) -> float:
        """The deadline of a dispatch of so many rows: other ones of this host may be before it."""
        usual = max(self._longest_s, self._n_slots * self._learner.seconds(n_rows))
        return min(self.ceiling_s, max(self._floor_s, PATIENCE * usual))

    def waited(self, seconds: float) -> None:
        """Takes one wait for a reply into account."""
        self._longest_s = max(seconds, RECENT * self._longest_s)
