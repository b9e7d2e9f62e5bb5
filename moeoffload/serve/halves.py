"""Computes a step in two halves: the host computes one while servers compute the experts of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Final

import torch

from moeoffload.host.recorder import PREFILL
from moeoffload.host.session import OffloadedModel
from moeoffload.host.speculative import GuessLength
from moeoffload.kernels.dense import MAX_ROWS
from moeoffload.serve.model_runner import ModelRunner
from moeoffload.serve.sequence import Share

_LEAST_CUT: Final = 64
"""Rows of a prompt's part that may be cut."""


class Halves:
    """Runs steps on a model in halves; those of few rows whole if that is faster for as many. For one thread.

    Halves are for hosts that compute on the CPU: on a GPU calls cost more than their work.
    """

    def __init__(self, offloaded: OffloadedModel, runner: ModelRunner) -> None:
        self._runner = runner
        self._turns = offloaded.turns
        self._recorder = offloaded.recorder
        self._choices: dict[int, GuessLength] = {}
        is_on_cpu = offloaded.model.device.type == "cpu"
        self._is_on = is_on_cpu and offloaded.settings.pipeline != "off" and bool(offloaded.links)

    def forward(self, shares: Sequence[Share], *, whole: bool) -> torch.Tensor:
        """As `ModelRunner.forward`; ``whole``: not in halves."""
        halves = cut(shares) if self._is_on and not whole else []
        if not halves:
            return self._runner.forward(shares)
        n_rows = sum(len(share.tokens) for share in shares)
        # More rows take other kernels, which may round otherwise: measured times must not decide on that.
        if n_rows > MAX_ROWS:
            return self._in_halves(*halves)
        # To guess one token or none: these are the two ways to choose from.
        choice = self._choices.setdefault(n_rows.bit_length(), GuessLength(1, adaptive=True))
        started = perf_counter()
        logits = self._in_halves(*halves) if choice.choose() else self._runner.forward(shares)
        choice.count(n_rows, perf_counter() - started)
        return logits

    def _in_halves(self, first: Sequence[Share], second: Sequence[Share]) -> torch.Tensor:
        halves = (lambda: self._runner.forward(first)), (lambda: self._runner.forward(second, beside=True))
        phase, n_rows = self._recorder.own.next_phase or PREFILL, sum(len(share.tokens) for share in second)
        return torch.cat(self._turns.run(phase, halves, self._recorder.waited_beside, n_tokens=n_rows))


def cut(shares: Sequence[Share]) -> list[list[Share]]:
    """Two halves of about as many rows, in this order; none if there is no such place to cut."""
    middle, start = sum(len(share.tokens) for share in shares) // 2, 0
    for number, share in enumerate(shares):
        n_before, n_rows = middle - start, len(share.tokens)
        if n_before >= n_rows:
            start += n_rows
            continue
        if n_rows >= _LEAST_CUT and n_before:
            begin = replace(share, tokens=share.tokens[:n_before], has_token=False)
            end = replace(share, tokens=share.tokens[n_before:], past=share.past + n_before)
            return [[*shares[:number], begin], [end, *shares[number + 1 :]]]
        after = number if 2 * n_before < n_rows else number + 1
        parts = [[*shares[:after]], [*shares[after:]]]
        least = min(sum(len(each.tokens) for each in part) for part in parts)
        return parts if 2 * least > middle else []
    return []
