"""Chooses the rows of each step: one for every decoding answer, and parts of prompts with the remaining rows."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from moeoffload.serve.block_manager import BlockManager
from moeoffload.serve.sequence import Sequence, Share

_LEAST_TURN: Final = 32  # minimum rows of a prompt in a step, if it has as many


class Scheduler:
    """Waiting and running sequences, first come, first served. For one thread.

    A sequence gets the pages of its whole prompt when it starts to run, and one more whenever its answer needs it. If
    none is free, the newest sequence is preempted: it frees its pages and starts again later, with its tokens so far.
    """

    def __init__(self, blocks: BlockManager, step_rows: int, max_running: int) -> None:
        """``step_rows`` and ``max_running``: the maximum tokens and sequences of a step."""
        self._blocks = blocks
        self._step_rows = step_rows
        self._max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self._is_full = False  # whether pages ran out; then none starts until one has ended

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended or was cancelled."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._blocks.free(sequence)
            self._is_full = False
        else:
            self.waiting.remove(sequence)

    def reset(self) -> None:
        """Drops all running sequences and the contents of the cache."""
        for sequence in self.running:
            self._blocks.free(sequence)
        self.running.clear()
        self._blocks.reset()
        self._is_full = False

    def schedule(self) -> list[Share]:
        """The shares of the next step; empty if there is nothing to do."""
        decoding = [sequence for sequence in self.running if sequence.n_left == 1]
        left = self._step_rows - len(decoding)
        shares = []
        for sequence in decoding:
            if not sequence.pages or not self._make_room(sequence):
                continue
            guesses = sequence.guesses[: max(0, left)]
            if guesses and not self._blocks.grow(sequence, len(sequence.tokens) + len(guesses)):
                guesses = []
            shares.append(Share(sequence, [sequence.tokens[-1], *guesses], sequence.n_computed, len(guesses), True))
            left -= len(guesses)
        self._admit()
        prompts = [sequence for sequence in self.running if sequence not in decoding]
        turn = max(_LEAST_TURN, math.ceil(left / len(prompts))) if prompts else 0
        for sequence in prompts:
            n_rows = min(turn, left, sequence.n_left)
            if n_rows > 0:
                tokens = sequence.tokens[sequence.n_computed : sequence.n_computed + n_rows]
                shares.append(Share(sequence, tokens, sequence.n_computed, 0, n_rows == sequence.n_left))
                left -= n_rows
        return shares

    def commit(self, share: Share, tokens: list[int]) -> None:
        """Records the results of a step; ``tokens``: the accepted guesses, then the next token."""
        sequence = share.sequence
        sequence.guesses = []
        # Positions after a rejected guess are overwritten later.
        sequence.n_computed = share.past + len(share.tokens) - share.n_guesses + max(0, len(tokens) - 1)
        sequence.tokens += tokens
        self._blocks.note_computed(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """Allocates a page for the last token of ``sequence`` if needed; False if the sequence itself was preempted."""
        while not self._blocks.grow(sequence, len(sequence.tokens)):
            newest = self.running.pop()
            self._blocks.free(newest)
            newest.guesses = []
            self.waiting.appendleft(newest)
            self._is_full = True
            if newest is sequence:
                return False
        return True

    def _admit(self) -> None:
        """Starts waiting sequences as long as there are pages for their prompts."""
        while self.waiting and len(self.running) < self._max_running and not (self._is_full and self.running):
            sequence = self.waiting[0]
            self._blocks.take_prefix(sequence)
            if not self._blocks.grow(sequence, len(sequence.tokens)):
                self._blocks.free(sequence)
                return
            self.running.append(self.waiting.popleft())
