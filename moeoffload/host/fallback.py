"""Computes a lost server's experts on the host: same rows, same rounding, same sums."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch

from moeoffload.errors import PayloadError
from moeoffload.host.expert_cache import ExpertCache
from moeoffload.host.flight import Chunk, Flight, ShardLink
from moeoffload.host.recorder import CallCounters
from moeoffload.payload import PayloadDtype, describe_bad_row, encode_rows, load_rows, store_rows
from moeoffload.placement import ExpertTable
from moeoffload.wire import FrameLayout


@dataclass(slots=True, eq=False)
class _LocalFlight(Flight):
    work: Chunk | None = None


class FallbackLink(ShardLink):
    """Computes the experts of ``table`` on the host, from a cache that all shards share."""

    def __init__(
        self, table: ExpertTable, n_experts: list[int], cache: ExpertCache, layout: FrameLayout, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """``n_experts`` counts the experts of each layer; ``layout`` and compute ``dtype`` are those of the servers."""
        super().__init__("this host", table, n_experts, layout, 2, device)
        self._cache = cache
        self._dtype = dtype

    def take(self, *, wait: bool) -> Flight | None:
        """See `ShardLink`."""
        return _LocalFlight(self)

    def send(self, flight: Flight, layer: int, start: int, chunk: Chunk, to: CallCounters) -> bool:
        """See `ShardLink`: rounds the rows as a frame would; `receive` computes them, while servers compute theirs."""
        assert isinstance(flight, _LocalFlight)
        boarded = self._board(flight, layer, start, chunk)
        if boarded is None:
            return False
        hidden, slots, weights = boarded
        ids = chunk[1] if flight.index is None else chunk[1][flight.index]
        experts = torch.where(slots >= 0, ids, -1)
        payload = self.layout.dtype_out
        shape = hidden.shape[0], payload.columns(hidden.shape[1])
        stored = torch.empty(shape, dtype=payload.torch_dtype, device=hidden.device)
        encode_rows(hidden, stored, payload, where=flight.where)
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
            raise PayloadError(f"{flight.where(bad)}: expert output {what} ({self.name})")
        flight.compute_s, flight.queue_s = perf_counter() - started, 0.0
        self.n_calls += 1
        if back is not PayloadDtype.F8:
            return stored
        load_rows(stored, sums)
        return sums

    def release(self, flight: Flight) -> None:
        """See `ShardLink`."""
