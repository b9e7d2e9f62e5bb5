"""Speculative decoding for a few requests at a time: how many tokens are drafted, and which are accepted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Final

from moeoffload.host.session import OffloadedModel
from moeoffload.host.speculative import Drafter, GuessLength, hidden_states_of, most_guesses, new_drafter
from moeoffload.kernels.attention import FEW_QUERIES
from moeoffload.serve.sequence import Sequence as TokenSequence
from moeoffload.serve.sequence import Share

IDLE_REQUESTS: Final = 2
"""The maximum number of requests. With more, a step reads most experts anyway, and rejected tokens cost time."""
_MOST_GUESSES: Final = FEW_QUERIES // IDLE_REQUESTS - 1
"""The maximum per request, so that verification uses kernels for few rows, whose rounding is batch-invariant."""


class Guesser:
    """Drafts tokens for greedy sequences while there are few, as far as that is measured to pay. For one thread."""

    def __init__(self, offloaded: OffloadedModel) -> None:
        self._offloaded = offloaded
        most, adaptive = min(_MOST_GUESSES, most_guesses(offloaded.settings)), offloaded.settings.adapt_guesses
        self._is_on = most > 0
        self._lengths = {n: GuessLength(most, adaptive=adaptive) for n in range(1, IDLE_REQUESTS + 1)}
        self._chosen: GuessLength | None = None  # for the next step
        self._guess_s = 0.0

    def guess(self, running: Sequence[TokenSequence], n_waiting: int) -> None:
        """Fills in ``guesses`` of the running sequences before a step."""
        self._chosen = None
        if not self._is_on or len(running) + n_waiting > IDLE_REQUESTS:
            return
        started = perf_counter()
        decoding = [each for each in running if each.n_answer and each.n_left == 1]
        if any(each.drafter is not None for each in decoding):
            self._chosen = self._lengths[len(decoding)]
            number = self._chosen.choose()
            for sequence in decoding:
                most = min(number, sequence.options.max_tokens - sequence.n_answer - 1)
                if sequence.drafter is not None and most > 0:
                    sequence.guesses = sequence.drafter.guess(sequence.tokens, most)
        self._guess_s = perf_counter() - started

    @contextlib.contextmanager
    def watching(self, shares: Sequence[Share]) -> Iterator[bool]:
        """Collects hidden states for drafters that need them while the step of ``shares`` is computed. Yields whether
        it has to be one pass: for these, or because its time tells how many guesses pay."""
        if not self._is_on or len(shares) > IDLE_REQUESTS:
            yield False
            return
        drafters = [self._drafter_of(share) for share in shares]
        if not any(drafter is not None and drafter.wants_hidden for drafter in drafters):
            yield self._chosen is not None
            return
        with hidden_states_of(self._offloaded.model) as got:
            yield True
        ((_, hidden),) = got
        rows = hidden.split([len(share.tokens) for share in shares])
        for share, drafter, own in zip(shares, drafters, rows, strict=True):
            if drafter is not None:
                drafter.take(share.past, own)

    def count(self, shares: Sequence[Share], n_tokens: int, seconds: float) -> None:
        """Records a step: ``n_tokens`` verified tokens, and its duration."""
        if self._chosen is None or any(len(share.tokens) != 1 + share.n_guesses for share in shares):
            return
        n_guessed = sum(share.n_guesses for share in shares)
        self._offloaded.recorder.count_verified(n_guessed, n_tokens - len(shares), n_tokens)
        # A sequence's first draft includes reading the prompt, so its time does not count.
        if all(share.sequence.n_answer > n_tokens + 1 for share in shares):
            self._chosen.count(n_tokens, self._guess_s + seconds)

    def _drafter_of(self, share: Share) -> Drafter | None:
        sequence = share.sequence
        if sequence.drafter is None and sequence.sampler.is_plain:
            sequence.drafter = new_drafter(self._offloaded.settings, self._offloaded.draft)
        return sequence.drafter


def accept(verified: Sequence[int], guesses: Sequence[int]) -> list[int]:
    """The accepted guesses and the next token; ``verified``: the model's choices after the last token and guesses."""
    wrong = (n for n, guess in enumerate(guesses) if guess != verified[n])
    return list(verified[: 1 + next(wrong, len(guesses))])
