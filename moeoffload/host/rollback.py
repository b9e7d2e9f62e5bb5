"""Takes tokens back out of a model's cache, also out of layers of linear attention, whose state holds them all at once.

Such a layer computes a pass of guesses one token at a time, which rounds as decoding does, and keeps its states after
each.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from moeoffload.errors import ModelError

_FEW_TOKENS: Final = 16  # passes of more are computed as a whole: these are not guesses
_PAST: Final = "moeoffload_past"  # attribute of caches: by layer, its states after each of the last tokens


def new_cache(model: Any) -> DynamicCache:
    """Returns an empty cache for ``model``."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def linear_layers(cache: Cache) -> set[int]:
    """Returns the numbers of the layers of linear attention."""
    return {n for n, layer in enumerate(cache.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}


def linear_modules(model: Any) -> Iterator[tuple[int, Any]]:
    """Yields the number and the module of each layer of linear attention that is known to compute with such states, and
    is no attention layer besides."""
    cache = new_cache(model)
    numbers = {n for n in linear_layers(cache) if not isinstance(cache.layers[n], CacheLayerMixin)}
    for module in model.modules() if numbers else ():
        number = getattr(module, "layer_idx", None)
        if number in numbers and "cache_params" in inspect.signature(module.forward).parameters:
            yield number, module


def states_of(layer: Any) -> list[torch.Tensor]:
    """Returns the states that a layer of linear attention has in a cache."""
    return [state for state in (*layer.conv_states.values(), *layer.recurrent_states.values()) if state is not None]


def prepare_rollback(model: Any) -> None:
    """Makes `roll_back` possible for caches of ``model``, which then computes as before.
    Raises ModelError: it has layers of a kind that cannot be rolled back."""
    left = linear_layers(new_cache(model))
    for number, module in list(linear_modules(model)):
        module.forward = functools.partial(_by_token, module.forward, number)
        left.discard(number)
    if left:
        raise ModelError(
            f"tokens cannot be guessed for {model.config.model_type}: its layer {min(left)} cannot go back after a "
            "wrong one; leave out --draft and --prompt-lookup"
        )


def keep_past(cache: Cache, *, guesses: bool = True) -> None:
    """Has ``cache`` keep what `roll_back` needs of the passes until then. Without ``guesses`` no token will be taken
    back."""
    linear = linear_layers(cache)
    setattr(cache, _PAST, {number: [] for number in linear} if guesses else {})
    for number, layer in enumerate(cache.layers):
        if number not in linear and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()


def roll_back(cache: Cache, n_tokens: int) -> None:
    """Takes the last ``n_tokens`` out of ``cache``, at most those of the passes since `keep_past`, which this ends."""
    past: dict[int, list[list[torch.Tensor]]] = getattr(cache, _PAST)
    linear = linear_layers(cache)
    for number, layer in enumerate(cache.layers):
        if number not in linear:
            layer.crop(-n_tokens)
        elif n_tokens:
            for state, before in zip(states_of(layer), past[number][-1 - n_tokens], strict=True):
                state.copy_(before)
    delattr(cache, _PAST)


def _by_token(
    forward: Callable[..., torch.Tensor],
    layer_idx: int,
    hidden_states: torch.Tensor,
    cache_params: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The forward of a linear attention module: hidden (batch, n, hidden) -> (batch, n, hidden)."""
    past = getattr(cache_params, _PAST, {}).get(layer_idx)
    if past is None:
        return forward(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)
    n_tokens = hidden_states.shape[1]
    outputs = []
    for part in hidden_states.split(1 if n_tokens <= _FEW_TOKENS else n_tokens, dim=1):
        outputs.append(forward(part, cache_params=cache_params, attention_mask=None, **kwargs))
        past.append([state.clone() for state in states_of(cache_params.layers[layer_idx])])
    return torch.cat(outputs, dim=1)
