"""Layers of linear attention in a packed batch: each request's rows with its own states, as if it ran alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from moeoffload.host.rollback import keep_past, linear_modules, new_cache, roll_back, states_of
from moeoffload.serve.paged_attention import PackedRows, StatesPart
from moeoffload.serve.sequence import Share


class LinearStates:
    """A model's layers of linear attention, of which most models have none. Until `close` its passes of packed rows
    compute them by request, with the states of its sequence."""

    def __init__(self, model: Any) -> None:
        self._model = model
        modules = list(linear_modules(model))
        self._forwards = [(module, module.forward) for _, module in modules]
        self.n_layers = len(modules)
        for number, module in modules:
            module.forward = functools.partial(_by_request, module.forward, number)

    def close(self) -> None:
        """Gives the layers their own computation back."""
        for module, forward in self._forwards:
            module.forward = forward

    def new(self, first: Mapping[int, Any] | None = None) -> Cache:
        """Returns the states of a request that starts, with copies of the ``first`` ones by layer."""
        cache = new_cache(self._model)
        for number, layer in (first or {}).items():
            cache.layers[number] = copy.deepcopy(layer)
        return cache

    def n_bytes(self, states: Cache) -> int:
        """Returns the bytes of states that have been used; they never change."""
        layers = (states.layers[module.layer_idx] for module, _ in self._forwards)
        return sum(state.nbytes for layer in layers for state in states_of(layer))

    def begin(self, shares: Sequence[Share]) -> None:
        """Prepares the sequences for a step; those that start, again or for the first time, get new states."""
        for share in shares if self._forwards else ():
            if share.sequence.states is None:
                share.sequence.states = self.new(share.sequence.first_states)
            if share.n_guesses:
                keep_past(share.sequence.states)

    def parts(self, share: Share) -> list[StatesPart]:
        """Returns the parts in which a share's rows are computed: they end where states are kept."""
        sequence, start, parts = share.sequence, share.past, []
        for end in sorted({share.end, *(n for n in sequence.kept_states if share.past < n < share.end)}):
            parts.append((end - start, sequence.states, sequence.kept_states.get(end)))
            start = end
        return parts

    def end(self, share: Share, n_accepted: int) -> None:
        """Takes the wrong guesses of a step back."""
        if self._forwards and share.n_guesses:
            roll_back(share.sequence.states, share.n_guesses - n_accepted)


def _by_request(
    forward: Callable[..., torch.Tensor],
    layer_idx: int,
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
    rows = hidden_states.split([n_rows for n_rows, *_ in packed_rows.states], dim=1)
    outputs = []
    for part, (_, states, kept) in zip(rows, packed_rows.states, strict=True):
        outputs.append(forward(part, cache_params=states, **kwargs))
        if kept is not None:
            kept[layer_idx] = copy.deepcopy(states.layers[layer_idx])
    return torch.cat(outputs, dim=1)
