"""Takes tokens back out of a model's cache, also out of layers of linear attention, whose state holds them all at once.

Such a layer computes a pass of few tokens one token at a time, which rounds as decoding does, and keeps its states
after each.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from moeoffload.errors import ModelError

_FEW_TOKENS: Final = 16  # passes of more are computed as a whole: these are not guesses
_PAST: Final = "moeoffload_past"  # attribute of caches: by layer, its states after each of the last tokens


def prepare_rollback(model: Any) -> None:
    """Makes `roll_back` possible for caches of ``model``, which then computes as before.
    Raises ModelError: it has layers of a kind that cannot be rolled back."""
    linear = linear_layers(DynamicCache(config=model.config.get_text_config(decoder=True)))
    for module in model.modules() if linear else ():
        number, forward = getattr(module, "layer_idx", None), module.forward
        if number in linear and "cache_params" in inspect.signature(forward).parameters:
            module.forward = functools.partial(_by_token, forward, number)
            linear.discard(number)
    if linear:
        raise ModelError(f"tokens cannot be guessed for {model.config.model_type}: layer {min(linear)} cannot go back")


def linear_layers(cache: Cache) -> set[int]:
    """Returns the numbers of the layers of linear attention."""
    return {n for n, layer in enumerate(cache.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}


def keep_past(cache: Cache) -> None:
    """Has ``cache`` keep what `roll_back` needs of the tokens to come."""
    linear = linear_layers(cache)
    setattr(cache, _PAST, {number: [] for number in linear})
    for number, layer in enumerate(cache.layers):
        if number not in linear and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()


def roll_back(cache: Cache, n_tokens: int) -> None:
    """Takes the last ``n_tokens`` out of ``cache``, at most those of the passes since the last call."""
    past: dict[int, list[list[torch.Tensor]]] = getattr(cache, _PAST)
    for number, layer in enumerate(cache.layers):
        if number not in past:
            layer.crop(-n_tokens)
            continue
        if n_tokens:
            for state, before in zip(_states(layer), past[number][-1 - n_tokens], strict=True):
                state.copy_(before)
        past[number].clear()


def _by_token(
    forward: Callable[..., torch.Tensor],
    layer_idx: int,
    hidden_states: torch.Tensor,
    cache_params: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The forward of a linear attention module: hidden (batch, n, hidden) -> (batch, n, hidden)."""
    past = getattr(cache_params, _PAST, None)
    if past is None:
        return forward(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)
    n_tokens = hidden_states.shape[1]
    layer = cache_params.layers[layer_idx]
    outputs = []
    for part in hidden_states.split(1 if n_tokens <= _FEW_TOKENS else n_tokens, dim=1):
        outputs.append(forward(part, cache_params=cache_params, attention_mask=None, **kwargs))
        past[layer_idx].append([state.clone() for state in _states(layer)])
    return torch.cat(outputs, dim=1)


def _states(layer: Any) -> list[torch.Tensor]:
    return [state for state in (*layer.conv_states.values(), *layer.recurrent_states.values()) if state is not None]
