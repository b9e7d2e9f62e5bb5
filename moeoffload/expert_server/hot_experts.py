"""Which experts of a layer lie in the fast tier of a server: those that were used most of late."""

from __future__ import annotations

from typing import Final

import numpy as np

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]

DECAY: Final = 0.99
"""What a use still counts after the next step: half of it after 69 steps."""
MOST_MOVES: Final = 2
"""Experts that come in one step."""
LEAD: Final = 1.5
"""So many uses more than the expert that makes room; less would be chance, and each move costs two copies."""
LEAST_SETS: Final = 3
"""A fast tier with room for fewer than so many steps' experts stays as it is: they would drive each other out."""


class HotExperts:
    """Follows the use of one layer's experts. Pure: it decides, and moves nothing.

    A score falls by `DECAY` with each step and rises by one with each use: frequency with a memory of about a hundred
    steps. Unlike "the least recently used goes", experts that come by in turn do not drive out each other.
    """

    def __init__(self, n_experts: int, n_fast: int, top_k: int) -> None:
        """The first ``n_fast`` experts begin in the fast tier."""
        self.is_fast = np.arange(n_experts) < n_fast
        self._scores = np.zeros(n_experts, np.float32)
        self._moves = n_fast >= LEAST_SETS * top_k

    def step(self, used: Numbers) -> list[tuple[int, int]]:
        """Counts a step that used some experts, (n) int64, each named once; returns who is to come and who goes for it,
        `MOST_MOVES` pairs at most."""
        scores = self._scores
        scores *= DECAY
        scores[used] += 1
        missing = used[~self.is_fast[used]]
        if not self._moves or not len(missing):
            return []
        held = np.flatnonzero(self.is_fast)
        coldest = held[np.argsort(scores[held], kind="stable")[:MOST_MOVES]]
        hottest = missing[np.argsort(-scores[missing], kind="stable")[:MOST_MOVES]]
        pairs = zip(hottest.tolist(), coldest.tolist(), strict=False)
        return [(come, go) for come, go in pairs if scores[come] > scores[go] + LEAD]

    def move(self, come: int, go: int) -> None:
        """Notes that a move was made."""
        self.is_fast[come], self.is_fast[go] = True, False
