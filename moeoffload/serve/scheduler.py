"""Chooses what each step computes: a token for every answer, and with the rows that are left parts of prompts."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from moeoffload.serve.block_manager import BlockManager
from moeoffload.serve.sequence import Sequence, Share

_LEAST_TURN: Final = 32  # rows of a prompt that are computed in its turn at least, if it has them


class Scheduler:
    """Sequences that wait and sequences that run, first come, first served. For one thread.

    A sequence gets the pages of its whole prompt when it starts to run, and one more whenever its answer needs it. If
    there is none, the newest sequence gives its pages back and starts again later, with what it has said.
    """

    def __init__(self, blocks: BlockManager, step_rows: int, max_running: int) -> None:
        """``step_rows``: the most tokens of a step; ``max_running``: the most sequences of a step."""
        self._blocks = blocks
        self._step_rows = step_rows
        self._max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order in which they came
        self._is_full = False  # whether pages ran out; then nothing starts until something has ended

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Drops a sequence, which has ended or is given up."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._blocks.free(sequence)
            self._is_full = False
        else:
            self.waiting.remove(sequence)

    def reset(self) -> None:
        """Drops all sequences that run, and forgets what is in the cache."""
        for sequence in self.running:
            self._blocks.free(sequence)
        self.running.clear()
        self._blocks.reset()
        self._is_full = False

    def schedule(self) -> list[Share]:
        """The shares of the next step; none if nothing is to be done."""
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
        """Takes over what a step has computed; ``tokens``: the next token, after the guesses that were right."""
        sequence = share.sequence
        sequence.guesses = []
        # What was computed behind a wrong guess is written anew.
        sequence.n_computed = share.past + len(share.tokens) - share.n_guesses + max(0, len(tokens) - 1)
        sequence.tokens += tokens
        self._blocks.note_computed(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """Room for the last token of ``sequence``; False if it had to give up its own."""
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
        """Starts sequences that wait, as long as there is room for their prompts."""
        while self.waiting and len(self.running) < self._max_running and not (self._is_full and self.running):
            sequence = self.waiting[0]
            self._blocks.take_prefix(sequence)
            if not self._blocks.grow(sequence, len(sequence.tokens)):
                self._blocks.free(sequence)
                return
            self.running.append(self.waiting.popleft())
