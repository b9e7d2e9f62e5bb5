"""Decides which experts of a layer a server keeps in its fast tier: those used most in recent steps."""

from __future__ import annotations

from typing import Final

import numpy as np

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]

DECAY: Final = 0.99
"""Factor by which a score falls with each step: to half after 69 steps."""
MOST_MOVES: Final = 2
"""Experts that enter the fast tier in one step, at most."""
LEAD: Final = 1.5
"""How far an expert's score must exceed that of the expert it replaces: a smaller lead may be chance, and each move
costs two copies."""
LEAST_SETS: Final = 3
"""No expert moves if the fast tier holds fewer than this many times ``top_k`` experts: they would evict each other."""


class HotExperts:
    """Tracks the use of one layer's experts and decides which move. Pure: it moves nothing itself.

    A score is multiplied by `DECAY` at each step and rises by one with each use: a frequency over about a hundred
    steps. Unlike with LRU, experts that are used in rotation do not evict each other.
    """

    def __init__(self, n_experts: int, n_fast: int, top_k: int) -> None:
        """Places the first ``n_fast`` experts in the fast tier."""
        self.is_fast = np.arange(n_experts) < n_fast
        self._scores = np.zeros(n_experts, np.float32)
        self._moves = n_fast >= LEAST_SETS * top_k

    def step(self, used: Numbers) -> list[tuple[int, int]]:
        """Counts a step that used the experts ``used``, (n) int64 without duplicates; returns at most `MOST_MOVES`
        pairs of an expert to bring into the fast tier and the one it replaces."""
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
        """Records that ``come`` has replaced ``go`` in the fast tier."""
        self.is_fast[come], self.is_fast[go] = True, False
