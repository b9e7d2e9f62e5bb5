"""Drafters guess the next tokens of one sequence; the model verifies the guesses in one pass.

Each sequence has its own drafter, which keeps track of the tokens it has seen. Guesses decide how fast an answer comes,
never what it says, so a drafter need not be exact or batch-invariant.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from transformers import DynamicCache
from transformers.generation import PromptLookupCandidateGenerator
from transformers.modeling_layers import MtpModel

from moeoffload.config import HostSettings


class Drafter(ABC):
    """Guesses tokens of one sequence. Not thread-safe."""

    wants_hidden: ClassVar[bool] = False
    """Whether `take` is to be called after every pass."""

    @abstractmethod
    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Returns up to ``most`` >= 1 tokens that may follow ``tokens``, a sequence that grows from call to call."""

    def take(self, first: int, hidden: torch.Tensor) -> None:  # noqa: B027
        """Takes the model's final hidden states (n, hidden) of the tokens from position ``first`` on, wrong guesses
        included."""


class PromptLookup(Drafter):
    """Guesses the tokens that followed an earlier occurrence of the last tokens."""

    def __init__(self, most: int) -> None:
        self._generator = PromptLookupCandidateGenerator(
            num_output_tokens=most, max_matching_ngram_size=2, max_length=1 << 30
        )

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafter`."""
        known = torch.tensor([tokens])
        candidates, _ = self._generator.get_candidates(known)
        guesses: list[int] = candidates[0, known.shape[1] :].tolist()
        return guesses[:most]


class DraftModel(Drafter):
    """Guesses the greedy output of a small model with the same vocabulary."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self._cache.activate_past_recording()
        self._cached: list[int] = []
        self._n_sure = 0  # how many of them were not guesses

    @torch.inference_mode()
    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafter`."""
        cached, n_same = self._cached, self._n_sure
        while n_same < min(len(cached), len(tokens) - 1) and cached[n_same] == tokens[n_same]:
            n_same += 1
        self._cache.crop(n_same - len(cached))
        self._n_sure, new = len(tokens), list(tokens[n_same:])
        guesses: list[int] = []
        self._cached = list(tokens[:n_same])
        while len(guesses) < most:
            positions = torch.arange(len(self._cached), len(self._cached) + len(new), device=self._model.device)
            logits = self._model(
                input_ids=torch.tensor([new], device=self._model.device),
                position_ids=positions[None],
                past_key_values=self._cache,
                use_cache=True,
            ).logits
            self._cached += new
            new = [int(logits[0, -1].argmax())]
            guesses += new
        return guesses


class DraftHead(Drafter):
    """Guesses with the model's own multi-token-prediction (MTP) layer.

    From the model's hidden state of a token and the token chosen after it, the layer predicts the one after that; it
    predicts further tokens from its own hidden states.
    """

    wants_hidden = True

    def __init__(self, head: Any) -> None:
        """``head``: see `load_draft_head`."""
        self._head = head
        self._cache = self._new_cache()
        self._rows: list[torch.Tensor] = []  # hidden states of tokens that the head has not seen
        self._first = self._end = 0  # positions of the first of these tokens, and after the last

    def _new_cache(self) -> DynamicCache:
        cache = DynamicCache(config=self._head.config)
        cache.activate_past_recording()
        return cache

    def take(self, first: int, hidden: torch.Tensor) -> None:
        """See `Drafter`."""
        if first > self._end:  # a gap: a cached prefix of another request, or steps with many requests
            self._cache = self._new_cache()
            self._rows, self._first, self._end = [], first, first
        self._cut(first)
        self._rows.append(hidden[max(0, self._end - first) :])
        self._end = max(self._end, first + len(hidden))

    def _cut(self, end: int) -> None:
        """Drops the hidden states from position ``end`` on."""
        while self._end > max(end, self._first):
            rows = self._rows.pop()
            self._end -= len(rows)
            if (kept := end - self._end) > 0:
                self._rows.append(rows[:kept])
                self._end = end

    @torch.inference_mode()
    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafter`."""
        self._cut(len(tokens) - 1)
        if self._first == self._end or self._end != len(tokens) - 1:
            return []
        rows, new, at = torch.cat(self._rows)[None], list(tokens[self._first + 1 :]), self._first + 1
        self._rows, self._first = [], self._end
        guesses: list[int] = []
        while True:
            rows = self._head.forward_layer(
                0,
                rows,
                torch.arange(at, at + len(new), device=rows.device)[None],
                self._cache,
                input_ids=torch.tensor([new], device=rows.device),
            )[:, -1:]
            at += len(new)
            new = [int(self._head.shared_head(rows)[0, -1].argmax())]
            guesses += new
            if len(guesses) == most:
                self._cache.crop(1 - most)
                return guesses


def new_drafter(settings: HostSettings, draft: Any) -> Drafter | None:
    """Returns the drafter of a new sequence, None for no guesses; ``draft`` is `OffloadedModel.draft`."""
    if draft is not None:
        return DraftHead(draft) if isinstance(draft, MtpModel) else DraftModel(draft)
    return PromptLookup(settings.prompt_lookup) if settings.prompt_lookup else None


def most_guesses(settings: HostSettings) -> int:
    """Returns the most tokens that are guessed at a time."""
    return settings.draft_tokens if settings.draft is not None else settings.prompt_lookup


@contextlib.contextmanager
def hidden_states_of(model: Any) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """While open, appends to the yielded list for every forward pass: the position of the first token and the final
    hidden states (rows, hidden)."""
    got: list[tuple[int, torch.Tensor]] = []

    def on_pass(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        got.append((int(kwargs["position_ids"][0, 0]), output.last_hidden_state[0]))

    handle = model.get_decoder().register_forward_hook(on_pass, with_kwargs=True)
    try:
        yield got
    finally:
        handle.remove()
