"""Answers prompts with an open model, streaming the text as it comes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from transformers import TextStreamer

from moeoffload.errors import PromptError
from moeoffload.host.kv_cache import generation_cache
from moeoffload.host.session import OffloadedModel
from moeoffload.host.speculative import generate_speculatively, speculative_options

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as the model takes it: input_ids and attention_mask (1, n) int64, and how many tokens may follow."""

    inputs: dict[str, torch.Tensor]
    max_new_tokens: int


class _Streamer(TextStreamer):
    """Writes the text of the completion, nothing else, to ``stream``."""

    def __init__(self, tokenizer: Any, stream: TextIO) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stream = stream
        self.on_tokens: Callable[[int], None] | None = None  # told how many tokens have come, the prompt's aside

    def put(self, value: torch.Tensor) -> None:
        """See `TextStreamer`, which takes one token at a time."""
        if self.next_tokens_are_prompt:
            super().put(value)
            return
        tokens = value.reshape(-1)
        if self.on_tokens is not None:
            self.on_tokens(tokens.numel())
        for token in tokens:
            super().put(token.reshape(1))

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """See `TextStreamer`: called with each piece of text as soon as it is certain."""
        self._stream.write(text + ("\n" if stream_end else ""))
        self._stream.flush()


def prepare_prompt(offloaded: OffloadedModel, prompt: str, *, chat: bool) -> PreparedPrompt:
    """Tokenizes ``prompt``; with ``chat`` through the tokenizer's chat template, if it has one.
    Raises PromptError: it has no tokens, or leaves no room for an answer in the model's context."""
    tokenizer = offloaded.tokenizer
    if not prompt.strip():
        raise PromptError("the prompt is empty")
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    n_tokens = encoded["input_ids"].shape[1]
    if n_tokens == 0:
        raise PromptError("the prompt has no tokens")
    most = getattr(offloaded.checkpoint.config.get_text_config(), "max_position_embeddings", None)
    room = offloaded.settings.max_new_tokens
    if most is not None:
        if n_tokens >= most:
            raise PromptError(f"the prompt has {n_tokens} tokens, the model's context holds {most}")
        if n_tokens + room > most:
            logger.warning("the context of %d tokens leaves room for %d new ones", most, most - n_tokens)
            room = most - n_tokens
    inputs = {name: encoded[name].to(offloaded.model.device) for name in ("input_ids", "attention_mask")}
    return PreparedPrompt(inputs, room)


def generate(offloaded: OffloadedModel, prompt: PreparedPrompt, stream: TextIO) -> torch.Tensor:
    """Writes the completion of ``prompt`` to ``stream`` as it comes; returns its tokens (n,) int64.
    Raises ServerError: a server failed; what was written so far stays."""
    settings, tokenizer = offloaded.settings, offloaded.tokenizer
    options: dict[str, Any] = {"do_sample": settings.temperature > 0, "max_new_tokens": prompt.max_new_tokens}
    if settings.temperature > 0:
        options["temperature"] = settings.temperature
        if settings.seed is not None:
            torch.manual_seed(settings.seed)
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        options["pad_token_id"] = tokenizer.eos_token_id
    options.update(generation_cache(offloaded.model))
    streamer = _Streamer(tokenizer, stream)
    n_prompt = prompt.inputs["input_ids"].shape[1]
    speculative = speculative_options(offloaded)
    if not speculative:
        tokens = offloaded.model.generate(**prompt.inputs, **options, streamer=streamer)
    else:
        with offloaded.recorder.speculating(n_prompt) as got:
            streamer.on_tokens = got
            tokens = generate_speculatively(offloaded.model, prompt.inputs, options, speculative, streamer)
    completion: torch.Tensor = tokens[0, n_prompt:]
    return completion
