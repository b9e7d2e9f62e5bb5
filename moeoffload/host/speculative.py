"""Speculative decoding by transformers' assisted generation: a pass verifies several guessed tokens at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from moeoffload.host.model import eos_tokens
from moeoffload.host.session import OffloadedModel


def speculative_options(offloaded: OffloadedModel) -> dict[str, Any]:
    """Keywords for ``model.generate`` by which tokens are guessed ahead, as the settings say; none for no guesses."""
    settings = offloaded.settings
    if offloaded.draft is not None:
        # transformers looks for the count of guesses with the model that guesses.
        guesses = offloaded.draft.generation_config
        guesses.num_assistant_tokens = settings.draft_tokens
        guesses.num_assistant_tokens_schedule = "constant"
        guesses.assistant_confidence_threshold = 0
        return {"assistant_model": offloaded.draft}
    return {"prompt_lookup_num_tokens": settings.prompt_lookup} if settings.prompt_lookup else {}


def generate_speculatively(
    model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any], speculative: dict[str, Any], streamer: Any
) -> torch.Tensor:
    """``model.generate`` with guesses from the second token on: (1, n) int64 with the prompt.

    transformers would verify the first guesses together with the prompt. Kernels go by the number of rows, so that the
    prompt's own rows could be rounded in another way than without guesses.
    """
    n_left = options["max_new_tokens"] - 1
    first: torch.Tensor = model.generate(**inputs, **options | {"max_new_tokens": 1})
    streamer.put(inputs["input_ids"])
    streamer.put(first[0, -1:])
    if not n_left or int(first[0, -1]) in eos_tokens(model):
        streamer.end()
        return first
    streamer.next_tokens_are_prompt = True  # what comes first now is known already
    with _goes_on(model):
        tokens: torch.Tensor = model.generate(
            input_ids=first,
            attention_mask=torch.ones_like(first),
            **options | {"max_new_tokens": n_left},
            **speculative,
            streamer=streamer,
        )
    return tokens


@contextlib.contextmanager
def _goes_on(model: Any) -> Iterator[None]:
    """While open, assisted generation begins behind what the cache holds; by itself it computes everything again."""
    original = model.prepare_inputs_for_generation

    def prepare(
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if is_first_iteration and past_key_values is not None:
            next_sequence_length = input_ids.shape[1] - past_key_values.get_seq_length()
        inputs: dict[str, Any] = original(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        return inputs

    model.prepare_inputs_for_generation = prepare
    try:
        yield
    finally:
        del model.prepare_inputs_for_generation
