"""Speculative decoding: a pass verifies several guessed tokens at a time; the text is the same as without guesses."""

from __future__ import annotations

import contextlib
import inspect
from time import perf_counter
from typing import Any

import torch
from transformers import DynamicCache

from moeoffload.errors import ModelError
from moeoffload.host.drafters import Drafter, hidden_states_of
from moeoffload.host.guess_length import GuessLength
from moeoffload.host.recorder import DECODE, PREFILL, Recorder


def check_can_verify(config: Any) -> None:
    """Raises ModelError: the cache of a model of ``config`` cannot be rolled back after a wrong guess."""
    if not DynamicCache(config=config.get_text_config(decoder=True)).is_croppable:
        raise ModelError(
            f"tokens cannot be guessed for {config.model_type}: its linear attention keeps a state, from which wrong "
            "guesses cannot be taken back; leave out --draft and --prompt-lookup"
        )


class VerifiedGeneration:
    """The ``custom_generate`` argument of ``model.generate``: guesses from the second token on, verified in each pass.

    The prompt gets a pass without guesses: kernels are chosen by the number of rows, so added guesses could change how
    its rows are rounded. Sampling draws one random number for each token, as without guesses.
    """

    def __init__(self, drafter: Drafter, lengths: GuessLength, streamer: Any, recorder: Recorder) -> None:
        self._drafter = drafter
        self._lengths = lengths
        self._streamer = streamer
        self._recorder = recorder

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Returns (1, n) int64, the prompt and the answer."""
        cache = model_kwargs["past_key_values"]
        self._recorder.told().prompt += input_ids.shape[1] - cache.get_seq_length()
        with contextlib.ExitStack() as stack:
            hidden = stack.enter_context(hidden_states_of(model)) if self._drafter.wants_hidden else []
            guesses: list[int] = []
            n_passes, is_over = 0, False
            while not is_over:
                started = perf_counter()
                if n_passes:
                    guesses = self._guess(input_ids, generation_config.max_length - input_ids.shape[1] - 1)
                self._recorder.own.next_phase = DECODE if n_passes else PREFILL
                logits = _forward(model, torch.cat([input_ids, input_ids.new_tensor([guesses])], dim=1), cache, guesses)
                for first, rows in sorted(hidden, key=lambda each: each[0]):  # chunks of a prompt may end in any order
                    self._drafter.take(first, rows)
                hidden.clear()
                n_new = 0
                for row, guess in enumerate([*guesses, -1]):
                    token = _choose(logits_processor(input_ids, logits[:, row].float()), generation_config.do_sample)
                    input_ids = torch.cat([input_ids, token[None]], dim=1)
                    self._streamer.put(token.cpu())
                    n_new += 1
                    is_over = bool(stopping_criteria(input_ids, None).all())
                    if is_over or int(token) != guess:
                        break
                self._recorder.told().completion += n_new
                self._recorder.count_verified(len(guesses), n_new - 1, n_new)
                if n_passes:
                    cache.crop(n_new - 1 - len(guesses))
                else:
                    cache.activate_past_recording()  # not before: sliding layers would keep a whole long prompt
                if n_passes > 1:  # the drafter reads the prompt before its first guesses
                    self._lengths.count(n_new, perf_counter() - started)
                n_passes += 1
        self._streamer.end()
        return input_ids

    def _guess(self, tokens: torch.Tensor, room: int) -> list[int]:
        most = min(self._lengths.choose(), room)
        return self._drafter.guess(tokens[0].tolist(), most) if most > 0 else []


def _forward(model: Any, tokens: torch.Tensor, cache: Any, guesses: list[int]) -> torch.Tensor:
    """Runs a pass over the tokens that are not in the cache; returns the last logits (1, 1 + guesses, vocabulary)."""
    past, length = cache.get_seq_length(), tokens.shape[1]
    n_rows = 1 + len(guesses)
    keep = {"logits_to_keep": n_rows} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits: torch.Tensor = model(
        input_ids=tokens[:, past:],
        attention_mask=torch.ones_like(tokens),
        position_ids=torch.arange(past, length, device=tokens.device)[None],
        past_key_values=cache,
        use_cache=True,
        **keep,
    ).logits
    return logits[:, -n_rows:]


def _choose(scores: torch.Tensor, is_sampled: bool) -> torch.Tensor:
    """Returns the next token (1,) int64, chosen as in transformers from processed scores (1, vocabulary)."""
    return torch.multinomial(scores.softmax(dim=-1), num_samples=1)[0] if is_sampled else scores.argmax(dim=-1)
