"""Tokens guessed ahead, by transformers' assisted generation: a pass verifies several, in one dispatch per layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from moeoffload.host.session import OffloadedModel


def guess_options(offloaded: OffloadedModel) -> dict[str, Any]:
    """What ``model.generate`` is told so that tokens are guessed ahead, as the settings say; empty for no guesses."""
    settings = offloaded.settings
    if offloaded.draft is not None:
        # transformers looks for the count of guesses with the model that guesses.
        guesses = offloaded.draft.generation_config
        guesses.num_assistant_tokens = settings.draft_tokens
        guesses.num_assistant_tokens_schedule = "constant"
        guesses.assistant_confidence_threshold = 0
        return {"assistant_model": offloaded.draft}
    return {"prompt_lookup_num_tokens": settings.prompt_lookup} if settings.prompt_lookup else {}


@contextlib.contextmanager
def guesses_after_prompt(model: Any) -> Iterator[None]:
    """While open, ``model.generate`` computes a prompt by itself, and guesses afterwards.

    transformers verifies the first guesses together with the prompt. Kernels go by the number of rows, so that the
    prompt's own rows could be rounded in another way than without guesses.
    """
    original = model._get_candidate_generator

    def patient(*args: Any, **kwargs: Any) -> Any:
        return _Patient(original(*args, **kwargs))

    model._get_candidate_generator = patient
    try:
        yield
    finally:
        del model._get_candidate_generator


class _Patient:
    """transformers' candidate generator, whose first guesses are dropped, as if all of them were wrong."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._has_begun = False

    def get_candidates(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """(1, n) int64 with guesses at the end, and their logits, if there are any."""
        candidates: tuple[torch.Tensor, Any] = self._generator.get_candidates(input_ids, *args, **kwargs)
        if self._has_begun:
            return candidates
        self._has_begun = True
        return input_ids, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)
