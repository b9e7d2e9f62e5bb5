"""Keys and values that grow in place: transformers' `DynamicCache` copies all of them for each new token."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

_LEAST_ROOM: Final = 256
"""Tokens."""


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` whose keys and values are the beginnings of buffers with room for more tokens.

    Calls in which autograd is on, on other devices than the CPU or under ``torch.compile`` are computed as by
    `DynamicLayer`. What was returned before a `crop` is overwritten by what is added after it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    buffers: tuple[torch.Tensor, torch.Tensor] | None = None
    """Of keys and of values: (batch, heads, tokens with room for more, dim)."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values (batch, heads, new tokens, dim); returns all of them. See `DynamicLayer`."""
        keys, values = self.keys, self.values
        if (
            not self.is_initialized
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or not (_fits(keys, key_states) and _fits(values, value_states))
        ):
            both: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return both
        n_kept = self.grow(key_states.shape[2])
        self.keys[:, :, n_kept:] = key_states
        self.values[:, :, n_kept:] = value_states
        return self.keys, self.values

    def holds(self, shape: tuple[int, int, int], dtype: torch.dtype) -> bool:
        """Whether there are keys and values, both (batch, heads, any tokens, dim), of this shape and dtype."""
        if not self.is_initialized:
            return False
        keys, values = self.keys, self.values
        return (
            keys.is_cpu
            and keys.ndim == 4
            and keys.dtype is dtype
            and values.dtype is dtype
            and (keys.shape[0], keys.shape[1], keys.shape[3]) == shape
            and values.shape == keys.shape
        )

    def grow(self, n_new: int) -> int:
        """Makes keys and values ``n_new`` tokens longer, which the caller writes; returns how many there were."""
        keys, values = self.keys, self.values
        n_kept = keys.shape[2]
        kept = self.buffers or (keys, values)
        self.buffers = _with_room(kept[0], keys, n_new), _with_room(kept[1], values, n_new)
        self.keys, self.values = (buffer.narrow(2, 0, n_kept + n_new) for buffer in self.buffers)
        return n_kept

    def reset(self) -> None:
        """See `DynamicLayer`."""
        self.buffers = None
        super().reset()


def _fits(kept: torch.Tensor, new: torch.Tensor) -> bool:
    return (
        kept.ndim == 4
        and kept.shape[:2] == new.shape[:2]
        and kept.shape[3] == new.shape[3]
        and kept.dtype == new.dtype
        and kept.is_cpu
        and new.is_cpu
    )


def _with_room(buffer: torch.Tensor, kept: torch.Tensor, n_new: int) -> torch.Tensor:
    """Returns the buffer if it begins with ``kept`` (batch, heads, tokens, dim) and has room for more; or a new one."""
    n_kept = kept.shape[2]
    is_beginning = kept.data_ptr() == buffer.data_ptr() and kept.stride() == buffer.stride()
    if not is_beginning or kept.shape[:2] != buffer.shape[:2] or n_kept + n_new > buffer.shape[2]:
        room = max(_LEAST_ROOM, n_kept // 8)
        batch, heads, _, dim = kept.shape
        # A tensor of inference mode could not be changed by later calls outside of it.
        with torch.inference_mode(False):
            buffer = torch.empty((batch, heads, n_kept + n_new + room, dim), dtype=kept.dtype)
        buffer[:, :, :n_kept] = kept
    return buffer


def _grow_in_place(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, Cache) and not torch.compiler.is_compiling():
        for layer in cache.layers:
            if type(layer) is DynamicLayer:
                layer.__class__ = GrowingLayer


def accelerate_cache(model: nn.Module) -> None:
    """Lets the `DynamicLayer` of any cache with which ``model`` is called become a `GrowingLayer`."""
    model.register_forward_pre_hook(_grow_in_place, with_kwargs=True)
