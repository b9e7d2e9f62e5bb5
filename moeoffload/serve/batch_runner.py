"""Computes one step after the other for the sequences that are there: which rows, on the model, and the next tokens."""

from __future__ import annotations

import itertools
from time import perf_counter
from typing import Final

import torch

from moeoffload.config import ServeSettings
from moeoffload.host.recorder import DECODE, PREFILL
from moeoffload.host.session import OffloadedModel
from moeoffload.placement import GIB
from moeoffload.serve.block_manager import BlockManager
from moeoffload.serve.halves import Halves
from moeoffload.serve.model_runner import ModelRunner
from moeoffload.serve.request import TokenChoice
from moeoffload.serve.scheduler import Scheduler
from moeoffload.serve.sequence import Share
from moeoffload.serve.speculative import Guesser, accept

PAGE_TOKENS: Final = 16  # a beginning is used again in pages of so many tokens


class BatchRunner:
    """A model, the memory of its keys and values, and the sequences that it computes together. For one thread."""

    def __init__(self, offloaded: OffloadedModel, settings: ServeSettings) -> None:
        """Takes the model over until it is closed.
        Raises ModelError: requests of this model cannot be batched; ServerError: an expert server failed."""
        self._recorder = offloaded.recorder
        reuse, room = settings.prefix_reuse, (int(settings.kv_gib * GIB), settings.max_running)
        self.runner = ModelRunner(offloaded.model, PAGE_TOKENS, *room, reuse=reuse)
        n_states = self.runner.n_kept_states
        self.blocks = BlockManager(self.runner.n_pages, PAGE_TOKENS, reuse=reuse, n_states=n_states)
        step_rows = max(settings.prefill_chunk, self.runner.max_running)
        self.scheduler = Scheduler(self.blocks, step_rows, self.runner.max_running)
        self._guesser = Guesser(offloaded)
        self._halves = Halves(offloaded, self.runner)

    def close(self) -> None:
        """Gives the model back. Idempotent."""
        self.runner.close()

    def schedule(self) -> list[Share]:
        """Chooses what the next step computes; nothing if no sequence is there."""
        self._guesser.guess(self.scheduler.running, len(self.scheduler.waiting))
        return self.runner.ordered(self.scheduler.schedule())

    def compute(self, shares: list[Share]) -> tuple[list[list[TokenChoice]], float]:
        """Computes a step: of each share its next tokens, none while its prompt has further parts; and the seconds.
        Raises MoeOffloadError: an expert server failed; nothing of the step counts."""
        started = perf_counter()
        decoding = all(len(share.tokens) == 1 + share.n_guesses for share in shares)
        self._recorder.own.next_phase = DECODE if decoding else PREFILL
        self.runner.linear.begin(shares)
        with self._guesser.watching(shares) as is_watching:
            logits = self._halves.forward(shares, whole=is_watching)
        choices = _choose(shares, logits)
        for share, each in zip(shares, choices, strict=True):
            self.runner.linear.end(share, len(each) - 1)
            self.scheduler.commit(share, [choice.token for choice in each])
        took_s = perf_counter() - started
        self._guesser.count(shares, sum(map(len, choices)), took_s)
        return choices, took_s


def _draws(share: Share) -> bool:
    """Whether an argmax does not say what its next token is."""
    return share.has_token and not share.sequence.sampler.is_plain


def _choose(shares: list[Share], logits: torch.Tensor) -> list[list[TokenChoice]]:
    """The next tokens of each share, from its rows of the logits. Of a GPU's two results are fetched: what is likeliest
    in every row, and the whole rows in which there is more to do."""
    # torch's argmax of bfloat16 on a CPU takes four times as long.
    likeliest: list[int] = logits.max(dim=-1).indices.tolist()
    choices: list[list[TokenChoice]] = []
    ends = list(itertools.accumulate(share.n_logits for share in shares))
    drawn = [end - 1 for end, share in zip(ends, shares, strict=True) if _draws(share)]
    rows = iter(torch.stack([logits[row] for row in drawn]).cpu() if drawn else ())
    for share, end in zip(shares, ends, strict=True):
        sampler, own = share.sequence.sampler, slice(end - share.n_logits, end)
        if sampler.prompt_scores is not None:
            sampler.prompt_scores.take(share.past, logits[own])
        if not share.has_token:
            choices.append([])
        elif _draws(share):
            choices.append([sampler.choose(next(rows).float())])
        else:
            tokens = accept(likeliest[own], share.tokens[1:] if share.n_guesses else [])
            choices.append([TokenChoice(token) for token in tokens])
    return choices
