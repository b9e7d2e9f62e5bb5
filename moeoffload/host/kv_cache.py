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


class _Buffer:
    """Memory (batch, heads, capacity, dim) of which the first ``filled`` tokens are in use."""

    def __init__(self, like: torch.Tensor, capacity: int) -> None:
        batch, heads, _, dim = like.shape
        self.memory = like.new_empty(batch, heads, capacity, dim)
        self.filled = 0
        self.view = self.memory

    def append(self, states: torch.Tensor) -> torch.Tensor:
        """Adds tokens; all of them so far, as a view."""
        n_tokens = states.shape[2]
        self.memory.narrow(2, self.filled, n_tokens).copy_(states)
        self.filled += n_tokens
        self.view = self.memory.narrow(2, 0, self.filled)
        return self.view

    def holds(self, current: torch.Tensor) -> bool:
        """Whether ``current`` is this memory's beginning."""
        return current is self.view or (
            current.data_ptr() == self.memory.data_ptr() and current.stride() == self.memory.stride()
        )

    def takes(self, current: torch.Tensor, states: torch.Tensor) -> bool:
        """Whether ``states`` can be added here to ``current``, which must be what is filled and no part of a graph."""
        return (
            self.holds(current)
            and current.shape[2] == self.filled
            and self.filled + states.shape[2] <= self.memory.shape[2]
            and (torch.is_inference_mode_enabled() or not self.memory.is_inference())
        )


class GrowingLayer(DynamicLayer):
    """transformers' `DynamicLayer` with room behind its keys and values. What others put there is copied once."""

    keys: Any
    values: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buffers: dict[str, _Buffer] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds (batch, heads, new tokens, dim) keys and values; returns all so far, as views. See `DynamicLayer`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not (_is_plain(self.keys, key_states) and _is_plain(self.values, value_states)):
            result: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return result
        self.keys = self._append("keys", self.keys, key_states)
        self.values = self._append("values", self.values, value_states)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Removes ``-tokens_to_remove`` tokens from the end. See `DynamicLayer`."""
        super().crop(tokens_to_remove)
        for name, buffer in self._buffers.items():
            current = getattr(self, name)
            if current is not None and buffer.holds(current):
                buffer.filled = min(buffer.filled, current.shape[2])

    def reset(self) -> None:
        """Forgets everything. See `DynamicLayer`."""
        super().reset()
        self._buffers.clear()

    def _append(self, name: str, current: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or not buffer.takes(current, states):
            length = (current.shape[2] if current.numel() else 0) + states.shape[2]
            buffer = _Buffer(states, length + max(_LEAST_ROOM, length // _SHARE_OF_ROOM))
            if current.numel():
                buffer.append(current)
            self._buffers[name] = buffer
        return buffer.append(states)


def _is_plain(current: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether adding ``states`` is what concatenation would do, without a graph of either."""
    same = not current.numel() or (
        current.ndim == 4
        and current.shape[:2] == states.shape[:2]
        and current.shape[3] == states.shape[3]
        and current.dtype == states.dtype
        and current.device == states.device
    )
    return (
        same
        and states.ndim == 4
        and not (torch.is_grad_enabled() and (current.requires_grad or states.requires_grad))
        and not torch.compiler.is_compiling()
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
