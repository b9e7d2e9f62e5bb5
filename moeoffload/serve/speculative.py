"""Speculative decoding by prompt lookup: tokens guessed from what a text has repeated, verified in the same step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from transformers.generation import PromptLookupCandidateGenerator

IDLE_REQUESTS: Final = 2
"""With more requests than these each step reads most of the experts anyway, and wrong guesses cost their time."""


class PromptLookup:
    """Guesses the next tokens of one greedy request at a time."""

    def __init__(self, n_guesses: int) -> None:
        self._n_guesses = n_guesses
        self._generator = PromptLookupCandidateGenerator(
            num_output_tokens=max(1, n_guesses), max_matching_ngram_size=2, max_length=1 << 30
        )

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that may follow ``tokens``; none if they do not say."""
        if min(self._n_guesses, most) < 1:
            return []
        known = torch.tensor([tokens])
        candidates, _ = self._generator.get_candidates(known)
        guesses: list[int] = candidates[0, known.shape[1] :].tolist()
        return guesses[:most]


def accept(verified: Sequence[int], guesses: Sequence[int]) -> list[int]:
    """The tokens that are certain: ``verified`` are the model's choices at the last token and after each guess."""
    n_right = 0
    while n_right < len(guesses) and guesses[n_right] == verified[n_right]:
        n_right += 1
    return list(verified[: n_right + 1])
