"""Attention of a packed batch: each request's queries with its own keys and values, as if it ran alone.

The rows of all requests are one sequence for the model. Here every request is a call of its own, so that the cost is
that of the requests one by one, and so are the bits; our own kernel reads the pages where they lie. On a GPU, where a
call costs more than its work, requests with one row each share calls. torch's attention of variable lengths could do
without their padding; it takes pages of 256 tokens (ours have 16), half precision, and no CPU, on which this is tested.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface

from moeoffload.kernels.attention import Pages
from moeoffload.kernels.sdpa import attention_if_fast

IMPLEMENTATION: Final = "moeoffload_paged"
"""Name under which transformers knows it (``attn_implementation``); it builds no masks for names it does not know."""

Attend = Callable[..., tuple[torch.Tensor, Any]]
StatesPart = tuple[int, Any, dict[int, Any] | None]
"""A number of rows, the states of their request, and where to keep, by layer, what these are after the rows."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one request, and where its keys and values lie.

    They are ``n_rows`` from row ``start`` of the batch on; with them the request has ``n_keys`` tokens, in ``pages``
    (n,) int64.
    """

    start: int
    n_rows: int
    n_keys: int
    pages: torch.Tensor
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Which keys each row sees, see `seen_keys`; None: all, or those before it. Made once for all layers."""
        window = None if window is None or window >= self.n_keys else window
        if window is None and self.n_rows in (1, self.n_keys):
            return None
        if window not in self._masks:
            self._masks[window] = self.seen(window)
        return self._masks[window]

    def seen(self, window: int | None) -> torch.Tensor:
        """Which keys each row sees: bool (1, 1, n_rows, n_keys); see `seen_keys`."""
        positions = torch.arange(self.n_keys - self.n_rows, self.n_keys, device=self.pages.device)
        return seen_keys(positions[:, None], self.n_keys, window)[None, None]


@dataclass(frozen=True, slots=True)
class SingleRows:
    """Rows of several requests, one of each, that are computed in one call: from row ``start`` of the batch on.

    ``n_keys`` (n, 1) int64 are the tokens that each request has with its row, ``longest`` the most of them. Their
    ``pages`` are (n, most pages) int64, of shorter requests filled up with any.
    """

    start: int
    n_keys: torch.Tensor
    longest: int
    pages: torch.Tensor
    _seen: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def seen(self, window: int | None, page_tokens: int) -> torch.Tensor:
        """Which keys each row sees: bool (n, most pages * page tokens); see `seen_keys`. Made once for all layers."""
        window = None if window is None or window >= self.longest else window
        if window not in self._seen:
            self._seen[window] = seen_keys(self.n_keys - 1, self.pages.shape[1] * page_tokens, window)
        return self._seen[window]


class KeyValueStore:
    """Memory of keys and values of every layer: (pages, page tokens, key heads, dim) each.

    Before `allocate` it only learns what the layers need, and every request is taken to be new.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.is_allocated = False
        self._memory: dict[int, list[torch.Tensor]] = {}
        """By layer its keys and its values; (0, heads, dim) before `allocate`."""

    @property
    def n_layers(self) -> int:
        """Layers that were seen."""
        return len(self._memory)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, over all layers."""
        pairs = self._memory.values()
        return sum(self.page_tokens * each.shape[-2:].numel() * each.itemsize for pair in pairs for each in pair)

    def allocate(self, n_pages: int) -> None:
        """Makes the memory of all layers that were seen."""
        self._memory = {
            layer: [each.new_empty(n_pages, self.page_tokens, *each.shape[1:]) for each in pair]
            for layer, pair in self._memory.items()
        }
        self.is_allocated = True

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keeps (1, key heads, rows, dim) keys and values; ``slots`` (rows,) int64: page * page tokens + token."""
        rows = [each[0].transpose(0, 1) for each in (key, value)]
        if not self.is_allocated:
            self._memory[layer] = [each[:0] for each in rows]
            return
        for memory, new in zip(self._memory[layer], rows, strict=True):
            memory.flatten(0, 1).index_copy_(0, slots, new)

    def memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all pages: (pages, key heads, page tokens, dim)."""
        keys, values = self._memory[layer]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def read(self, layer: int, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values (1, key heads, n_keys, dim) of a request."""
        keys, values = (
            memory.index_select(0, segment.pages).flatten(0, 1)[: segment.n_keys].transpose(0, 1)[None]
            for memory in self._memory[layer]
        )
        return keys, values

    def read_padded(self, layer: int, rows: SingleRows, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (n, key heads, most tokens, dim) of several requests; zero where they are not ``seen``, since
        what other requests have left there may be no finite number."""
        keys, values = (
            memory.index_select(0, rows.pages.flatten())
            .view(*seen.shape, *memory.shape[2:])
            .masked_fill_(~seen[:, :, None, None], 0)
            .transpose(1, 2)
            for memory in self._memory[layer]
        )
        return keys, values


@dataclass(frozen=True, slots=True)
class PackedRows:
    """What attention has to know of a batch: what each of its calls computes, in the order of the rows; ``slots`` (see
    `KeyValueStore.write`); whether families' own attention does, with a mask to add; and for layers of linear attention
    the parts of the rows (see `LinearStates`), in the same order."""

    store: KeyValueStore
    segments: Sequence[Segment | SingleRows]
    slots: torch.Tensor
    is_eager: bool
    states: Sequence[StatesPart]


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed_rows: PackedRows | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls; shapes as in its ``sdpa_attention_forward``, with a batch of one.

    ``query`` (1, heads, rows, dim), ``key`` and ``value`` (1, key heads, rows, dim) hold the rows of all requests one
    after the other; ``packed_rows`` tells which rows are whose, and goes to the model, which hands it on. The mask is
    not used: a row sees what comes before it in its own request.
    Raises NotImplementedError: the model does not hand on what it was given.
    """
    if packed_rows is None:
        raise NotImplementedError("it gives its attention no arguments of its caller")
    store, layer = packed_rows.store, int(module.layer_idx)  # type: ignore[arg-type]
    attend: Attend = AttentionInterface()["sdpa"]
    if packed_rows.is_eager:  # what a family brings with it whose attention torch does not have
        attend = sys.modules[type(module).__module__].eager_attention_forward
    window = kwargs.get("sliding_window") or getattr(module, "sliding_window", None)
    store.write(layer, packed_rows.slots, key, value)
    parts: list[torch.Tensor] = []
    for segment in packed_rows.segments:
        if isinstance(segment, SingleRows):
            seen = segment.seen(window, store.page_tokens)
            keys, values = store.read_padded(layer, segment, seen)
            queries = query[0].narrow(1, segment.start, len(seen)).transpose(0, 1)[:, :, None]
            singles, _ = attend(module, queries, keys, values, seen[:, None, None], is_causal=False, **kwargs)
            parts.append(singles.transpose(0, 1))
            continue
        n_rows, n_keys = segment.n_rows, segment.n_keys
        mask = segment.mask(window)
        is_causal = n_rows > 1 and mask is None
        queries = query.narrow(2, segment.start, n_rows)
        part = None
        if store.is_allocated and not packed_rows.is_eager:
            pages = Pages(segment.pages, n_keys)
            memory = store.memory(layer)
            part = attention_if_fast(module, queries, *memory, mask, is_causal=is_causal, pages=pages, **kwargs)
        if part is None:
            if n_rows == n_keys:
                keys, values = (each.narrow(2, segment.start, n_rows) for each in (key, value))
            else:
                keys, values = store.read(layer, segment)
            if packed_rows.is_eager:
                if is_causal:
                    mask = segment.seen(None)
                if mask is not None:
                    mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
            part, _ = attend(module, queries, keys, values, mask, is_causal=is_causal, **kwargs)
        parts.append(part)
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def seen_keys(positions: torch.Tensor, n_keys: int, window: int | None) -> torch.Tensor:
    """Which of ``n_keys`` keys the tokens at ``positions`` (n, 1) see: bool (n, n_keys); their own, and those before
    it, of which only the last ``window`` - 1."""
    keys = torch.arange(n_keys, device=positions.device)
    seen = keys <= positions
    if window is not None:
        seen &= keys > positions - window
    return seen


AttentionInterface.register(IMPLEMENTATION, paged_attention)
