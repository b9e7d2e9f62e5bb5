"""Computes a lost server's experts on the host: same rows, same rounding, same sums."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch

from moeoffload.errors import PayloadError
from moeoffload.host.counters import CallCounters
from moeoffload.host.expert_cache import ExpertCache
from moeoffload.host.flight import Chunk, Flight, ShardLink
from moeoffload.payload import PayloadDtype, describe_bad_row, encode_rows, load_rows, store_rows
from moeoffload.placement import ExpertTable, slot_table
from moeoffload.wire import FrameLayout


@dataclass(slots=True, eq=False)
class _LocalFlight(Flight):
    work: Chunk | None = None


class FallbackLink(ShardLink):
    """Computes the experts of ``table`` on the host, from a cache that all shards share."""

    def __init__(
        self, table: ExpertTable, n_experts: list[int], cache: ExpertCache, layout: FrameLayout, dtype: torch.dtype
    ) -> None:
        """``n_experts`` counts the experts of each layer; ``layout`` and compute ``dtype`` are those of the servers."""
        super().__init__("this host", table, n_experts, layout, n_slots=2)
        self._cache = cache
        self._dtype = dtype
        self._held = [slot_table(held, n + 1) >= 0 for held, n in zip(table.layers, n_experts, strict=True)]

    def take(self, *, wait: bool) -> Flight | None:
        """See `ShardLink`."""
        return _LocalFlight(self)

    def send(self, flight: Flight, layer: int, start: int, chunk: Chunk, to: CallCounters) -> bool:
        """See `ShardLink`: rounds the rows as a frame would; `receive` computes them, while servers compute theirs."""
        assert isinstance(flight, _LocalFlight)
        hidden, ids, weights = chunk
        held = self._held[layer].to(ids.device)[ids]
        hit = held.any(dim=1)
        n_hit = int(hit.sum())
        if n_hit == 0:
            return False
        flight.layer, flight.start, flight.chunk_rows, flight.n_rows = layer, start, ids.shape[0], n_hit
        flight.index = None if n_hit == ids.shape[0] else hit.nonzero().squeeze(1)
        experts = torch.where(held, ids, -1)
        if flight.index is not None:
            hidden, experts, weights = hidden[flight.index], experts[flight.index], weights[flight.index]
        payload = self.layout.dtype_out
        shape = hidden.shape[0], payload.columns(hidden.shape[1])
        stored = torch.empty(shape, dtype=payload.torch_dtype, device=hidden.device)
        encode_rows(hidden, stored, payload, where=lambda row: f"layer {layer}, row {start + row} of a chunk")
        weights = weights if weights.dtype == torch.float32 else weights.to(self._dtype)
        rows = torch.empty(hidden.shape, dtype=self._dtype, device=hidden.device)
        load_rows(stored, rows)
        flight.work = rows, experts, weights
        return True

    def receive(self, flight: Flight, to: CallCounters) -> torch.Tensor:
        """See `ShardLink`."""
        assert isinstance(flight, _LocalFlight)
        assert flight.work is not None
        rows, experts, weights = flight.work
        started = perf_counter()
        sums = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        self._cache.compute(flight.layer, rows, experts, weights, sums)
        back = self.layout.dtype_back
        stored = torch.empty(rows.shape[0], back.columns(rows.shape[1]), dtype=back.torch_dtype, device=rows.device)
        bad = store_rows(sums, stored)
        if bad is not None:
            what = describe_bad_row(sums[bad], back)
            raise PayloadError(f"layer {flight.layer}: expert output {what} ({self.name})")
        flight.compute_s, flight.queue_s = perf_counter() - started, 0.0
        self.n_calls += 1
        if back is not PayloadDtype.F8:
            return stored
        load_rows(stored, sums)
        return sums

    def release(self, flight: Flight) -> None:
        """See `ShardLink`."""
