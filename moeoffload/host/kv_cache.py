"""A key-value cache that grows ahead of need, so that a step copies its own rows only, not the whole past.

transformers' `DynamicCache` concatenates, which with a past of some thousand tokens costs milliseconds per layer.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_OTHER_CACHES: Final = ("mamba", "minimaxfor")
"""In the names of models whose cache is of another class; the later MiniMax-M2 has an ordinary one."""
_LEAST_ROOM: Final = 64
_SHARE_OF_ROOM: Final = 4


class GrowingLayer(DynamicLayer):
    """transformers' `DynamicLayer` with room behind its keys and values; for generation, where nothing has a graph."""

    keys: Any
    values: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._memory: dict[str, torch.Tensor] = {}
        """(batch, heads, capacity, dim) each; keys and values are its first tokens."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds (batch, heads, new tokens, dim) keys and values; returns all so far, as views. See `DynamicLayer`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.get_seq_length()
        self.keys = self._append("keys", self.keys, key_states, past)
        self.values = self._append("values", self.values, value_states, past)
        return self.keys, self.values

    def _append(self, name: str, current: torch.Tensor, states: torch.Tensor, past: int) -> torch.Tensor:
        memory, n_new = self._memory.get(name), states.shape[2]
        if memory is None or not _takes(memory, current, states, past + n_new):
            length = past + n_new
            capacity = length + max(_LEAST_ROOM, length // _SHARE_OF_ROOM)
            memory = self._memory[name] = states.new_empty(*states.shape[:2], capacity, states.shape[3])
            if past:
                memory.narrow(2, 0, past).copy_(current)
        memory.narrow(2, past, n_new).copy_(states)
        return memory.narrow(2, 0, past + n_new)


def _takes(memory: torch.Tensor, current: torch.Tensor, states: torch.Tensor, length: int) -> bool:
    """Whether ``states`` can be added in ``memory``: ``current`` is its beginning, not what others put in its place."""
    return (
        length <= memory.shape[2]
        and current.data_ptr() == memory.data_ptr()
        and current.stride() == memory.stride()
        and current.shape[0] == states.shape[0]
        and (torch.is_inference_mode_enabled() or not memory.is_inference())
    )


def growing_cache(config: Any) -> DynamicCache:
    """A `DynamicCache` for a model's configuration, whose layers of full attention grow ahead of need.

    Sliding, linear and other layers are transformers' own. Keys and values have the bits of `DynamicCache`'s; they are
    views of memory with room behind them.
    """
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    return cache


def rewind(cache: DynamicCache, n_tokens: int) -> bool:
    """Forgets all but the first ``n_tokens`` tokens, of which layers may hold more or fewer after a pass that failed.

    False for a cache with other layers than growing ones: it cannot be rewound, and is as it was.
    """
    if not all(type(layer) is GrowingLayer for layer in cache.layers):
        return False
    for layer in cache.layers:
        layer.crop(min(0, n_tokens - layer.get_seq_length()))
    return True


def generation_cache(model: Any) -> dict[str, DynamicCache]:
    """Keywords for ``model.generate``: a growing cache where it would make a `DynamicCache`, else nothing."""
    wanted = model.generation_config
    if (
        any(name in type(model).__name__.lower() for name in _OTHER_CACHES)
        or wanted.use_cache is False
        or wanted.cache_implementation not in (None, "dynamic")
    ):
        return {}
    return {"past_key_values": growing_cache(model.config.get_text_config(decoder=True))}
