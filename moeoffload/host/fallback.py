"""Computes a lost server's experts on the host: same rows, same rounding, same sums.

They are read from the checkpoint when they are needed; the least recently used are evicted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch
from torch import nn

from moeoffload.checkpoint import Checkpoint
from moeoffload.errors import PayloadError
from moeoffload.host.flight import Chunk, Flight, ShardLink
from moeoffload.host.recorder import CallCounters
from moeoffload.kernels import KernelInput, KernelWorkspace, LayerKernels
from moeoffload.kernels.packing import packed_parts
from moeoffload.payload import PayloadDtype, describe_bad_row, encode_rows, load_rows, store_rows
from moeoffload.placement import ExpertTable
from moeoffload.wire import FrameLayout

READ_BYTES: Final = 256 << 20  # experts are read in groups of at most this size, in addition to the cache
_META: Final = torch.device("meta")

_Shape = tuple[object, ...]


@dataclass(slots=True, eq=False)
class _LocalFlight(Flight):
    work: Chunk | None = None


class FallbackLink(ShardLink):
    """Computes the experts of ``table`` on the host, from a cache that all shards share."""

    def __init__(self, table: ExpertTable, cache: ExpertCache, layout: FrameLayout) -> None:
        """``layout`` is that of the servers' frames."""
        n_experts = [layer.n_experts for layer in cache.checkpoint.layers]
        super().__init__("this host", table, n_experts, layout, 2, cache.device)
        self._cache = cache
        self._dtype = cache.checkpoint.dtype

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


class ExpertCache:
    """Computes any experts of a model with at most ``n_bytes`` of them in memory. Thread-safe, one call at a time.

    A row's sum has the same bits as from a server with the same kernel and device: experts are added in the order of
    the row's choices, whichever slots hold them.
    """

    def __init__(self, checkpoint: Checkpoint, n_bytes: int, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self._n_bytes = n_bytes
        self._lock = threading.Lock()
        self._shapes = [_shape_of(checkpoint, layer.index) for layer in checkpoint.layers]
        self._pools: dict[_Shape, _Pool] = {}

    def compute(
        self, layer: int, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Writes the weighted sum of some experts of one layer into ``out`` (n, hidden) float32.

        ``rows`` (n, hidden) in the compute dtype, ``experts`` (n, top_k) int64 with -1 for those to skip, ``weights``
        (n, top_k) float32 or the compute dtype. Raises ModelError: the checkpoint cannot be read.
        """
        with self._lock:
            pool = self._pool(layer)
            for start, end, needed in _parts(experts, pool.n_slots):
                table = pool.slots_of(layer, needed)
                slots = table[experts[start:end]]
                pool.kernels(KernelInput(rows[start:end], slots, weights[start:end], out[start:end]))

    def _pool(self, layer: int) -> _Pool:
        shape = self._shapes[layer]
        pool = self._pools.get(shape)
        if pool is None:
            checkpoint = self.checkpoint
            alike = [checkpoint.layers[i] for i, other in enumerate(self._shapes) if other == shape]
            share = self._n_bytes // len(set(self._shapes))
            n_slots = min(share // alike[0].expert_bytes, sum(each.n_experts for each in alike))
            pool = self._pools[shape] = _Pool(checkpoint, layer, max(checkpoint.top_k, n_slots), self.device)
        return pool


class _Pool:
    """Room for ``n_slots`` experts of layers whose experts have the same shape."""

    def __init__(self, checkpoint: Checkpoint, layer: int, n_slots: int, device: torch.device) -> None:
        self.n_slots = n_slots
        self._checkpoint = checkpoint
        self._device = device
        self._slots: OrderedDict[tuple[int, int], int] = OrderedDict()
        # Created and filled outside inference mode: an inference tensor could not be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._module = checkpoint.empty_experts(layer, n_slots, device, in_tiles=True)
            self.kernels: LayerKernels = LayerKernels(self._module, KernelWorkspace())

    def slots_of(self, layer: int, needed: Sequence[int]) -> torch.Tensor:
        """Returns (n_experts + 1,) int64: the slot of each needed expert; the last entry, for expert -1, is -1."""
        kept = set(needed)
        missing = [expert for expert in needed if (layer, expert) not in self._slots]
        for expert in kept.difference(missing):
            self._slots.move_to_end((layer, expert))
        step = max(1, READ_BYTES // self._checkpoint.layers[layer].expert_bytes)
        for at in range(0, len(missing), step):
            self._read(layer, missing[at : at + step], kept)
        table = torch.full((self._checkpoint.layers[layer].n_experts + 1,), -1, dtype=torch.int64)
        for expert in needed:
            table[expert] = self._slots[layer, expert]
        return table.to(self._device)

    def _read(self, layer: int, experts: Sequence[int], kept: set[int]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            read = self._checkpoint.build_experts(layer, experts, self._device, in_tiles=True)
            for i, expert in enumerate(experts):
                slot = self._free_slot(layer, kept)
                for room, values in zip(_tensors(self._module), _tensors(read), strict=True):
                    if room.dim() > 0 and room.shape[0] == self.n_slots:
                        room[slot].copy_(values[i])
                    else:
                        room.copy_(values)
                self._slots[layer, expert] = slot

    def _free_slot(self, layer: int, kept: set[int]) -> int:
        if len(self._slots) == self.n_slots:
            oldest = next(key for key in self._slots if key[0] != layer or key[1] not in kept)
            del self._slots[oldest]
        # Not just the next number: a read that Ctrl-C interrupted has left a free slot anywhere.
        used = set(self._slots.values())
        return next(slot for slot in range(self.n_slots) if slot not in used)


def _shape_of(checkpoint: Checkpoint, layer: int) -> _Shape:
    """Returns a key that is equal for layers that can share a pool: same shapes and formats, all tensors per expert."""
    one, two = (checkpoint.empty_experts(layer, n, _META) for n in (1, 2))
    shapes = [tuple(each.shape) for each in _tensors(one)]
    shared = any(shape == each.shape for shape, each in zip(shapes, _tensors(two), strict=True))
    return layer if shared else None, *shapes, *(part.format for part in packed_parts(one))


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    """Returns all tensors of an experts module: its parameters, and the data and scales of its packed matrices."""
    packed = [each for part in packed_parts(module) for each in (part.data, part.scales) if each is not None]
    return [*module.parameters(), *packed]


def _parts(experts: torch.Tensor, most: int) -> Iterator[tuple[int, int, list[int]]]:
    """Splits rows (n, top_k) into parts of at most ``most`` experts: first row, row after the last, experts."""
    start = 0
    wanted: set[int] = set()
    for row, chosen in enumerate(experts.tolist()):
        more = {expert for expert in chosen if expert >= 0}
        if len(wanted | more) > most:
            yield start, row, sorted(wanted)
            start, wanted = row, set()
        wanted |= more
    yield start, experts.shape[0], sorted(wanted)
