"""Layers of linear attention in a packed batch: each request's rows with its own states, as if it ran alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from moeoffload.host.rollback import keep_past, linear_modules, new_cache, roll_back, states_of
from moeoffload.serve.paged_attention import PackedRows
from moeoffload.serve.sequence import Share


class LinearStates:
    """A model's layers of linear attention, of which most models have none. Until `close` its passes of packed rows
    compute them by request, with the states of its sequence."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._forwards = [(module, module.forward) for _, module in linear_modules(model)]
        self.n_layers = len(self._forwards)
        for module, forward in self._forwards:
            module.forward = functools.partial(_by_request, forward)

    def close(self) -> None:
        """Gives the layers their own computation back."""
        for module, forward in self._forwards:
            module.forward = forward

    def new(self) -> Cache:
        """Returns the states of a new request."""
        return new_cache(self._model)

    def n_bytes(self, states: Cache) -> int:
        """Returns the bytes of states that have been used; they never change."""
        layers = (states.layers[module.layer_idx] for module, _ in self._forwards)
        return sum(state.nbytes for layer in layers for state in states_of(layer))

    def begin(self, shares: Sequence[Share]) -> None:
        """Prepares the sequences for a step; those that start, again or for the first time, get new states."""
        for share in shares if self._forwards else ():
            if not share.past:
                share.sequence.states = self.new()
            if share.n_guesses:
                keep_past(share.sequence.states)

    def end(self, share: Share, n_accepted: int) -> None:
        """Takes the wrong guesses of a step back."""
        if self._forwards and share.n_guesses:
            roll_back(share.sequence.states, share.n_guesses - n_accepted)


def _by_request(
    forward: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    cache_params: Any = None,
    attention_mask: torch.Tensor | None = None,
    packed_rows: PackedRows | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The forward of a linear attention module: hidden (1, rows, hidden) -> (1, rows, hidden).
    Raises NotImplementedError: the model does not hand on what it was given."""
    if packed_rows is None:
        raise NotImplementedError("it gives its linear attention no arguments of its caller")
    parts = hidden_states.split([n_rows for n_rows, _ in packed_rows.states], dim=1)
    calls = zip(parts, packed_rows.states, strict=True)
    return torch.cat([forward(part, cache_params=states, **kwargs) for part, (_, states) in calls], dim=1)
