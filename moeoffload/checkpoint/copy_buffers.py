"""Page-locked buffers through which weights go to a GPU: readers fill one while the other is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Self, cast

import torch

from moeoffload.formats import PackedWeights
from moeoffload.huge_pages import empty_weights
from moeoffload.page_locked import PageLocked

BUFFER_BYTES: Final = 64 << 20
"""Size of each of the two; larger if a single expert is larger."""
_ALIGNMENT: Final = 64
Pair = tuple[torch.Tensor, torch.Tensor]
"""Destination and source of a copy."""


class CopyBuffers:
    """Two buffers, allocated when a GPU's weights are first read and freed by `close`; for one thread at a time.

    If they cannot be page-locked, which is logged, the driver makes an extra copy.
    """

    def __init__(self, n_bytes: int = BUFFER_BYTES) -> None:
        self._n_bytes = n_bytes
        self._buffers: tuple[torch.Tensor, ...] = ()
        self._pages: PageLocked | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._waits: dict[int, Callable[[], object]] = {}
        """Functions that wait for the copies in progress, by buffer."""
        self._turn = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def serve(self, device: torch.device) -> bool:
        """Whether weights for this device go through the buffers."""
        return device.type == "cuda"

    def in_parts(
        self, outs: Sequence[PackedWeights], experts: Sequence[int]
    ) -> Iterator[tuple[list[PackedWeights], Sequence[int]]]:
        """Yields, until all are done, room in a buffer and those of ``experts`` that fit into it.

        ``outs`` have room for all experts on one device, not in tiles. The caller fills the yielded room; when it asks
        for the next part, copying to ``outs`` begins. `settle` waits for the copies.
        """
        expert_bytes = sum(_padded(t[0].nbytes) for out in outs for t in _tensors(out))
        self._make(max(self._n_bytes, expert_bytes), outs[0].device)
        at_once = max(1, self._buffers[0].nbytes // expert_bytes)
        for first in range(0, len(experts), at_once):
            some = experts[first : first + at_once]
            rooms = _carve(self._free_buffer(), outs, len(some))
            yield rooms, some
            pairs = [
                (to[first : first + len(some)], source)
                for out, room in zip(outs, rooms, strict=True)
                for to, source in zip(_tensors(out), _tensors(room), strict=True)
            ]
            self._waits[self._turn] = self._start(pairs, outs[0].device)

    def settle(self) -> None:
        """Waits for all copies."""
        while self._waits:
            self._waits.popitem()[1]()

    def close(self) -> None:
        """Waits for all copies and frees the memory. Idempotent."""
        self.settle()
        if self._pages is not None:
            self._pages.close()
        self._pages, self._buffers = None, ()
        self._streams.clear()

    def _free_buffer(self) -> torch.Tensor:
        """Returns the other buffer after waiting for the copy from it."""
        self._turn = 1 - self._turn
        if wait := self._waits.pop(self._turn, None):
            wait()
        return self._buffers[self._turn]

    def _make(self, n_bytes: int, device: torch.device) -> None:
        if not self._buffers or self._buffers[0].nbytes < n_bytes:
            self.close()
            n_bytes = _padded(n_bytes)
            both = empty_weights((2 * n_bytes,), torch.uint8)
            self._buffers = both[:n_bytes], both[n_bytes:]
            self._pages = self._lock(memoryview(cast(Any, both.numpy())), device)
        self._begin(device)

    def _lock(self, memory: memoryview, device: torch.device) -> PageLocked | None:
        return PageLocked([memory], device)

    def _begin(self, device: torch.device) -> None:
        """Makes copies wait for the work queued on the device so far, which may still use the destination memory."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_stream(torch.cuda.current_stream(device))

    def _start(self, pairs: Iterable[Pair], device: torch.device) -> Callable[[], object]:
        """Starts the copies; returns a function that waits for them."""
        done = torch.cuda.Event()
        with torch.cuda.stream(self._streams[device]):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            done.record()
        return done.synchronize


def _tensors(weights: PackedWeights) -> list[torch.Tensor]:
    return [weights.data] if weights.scales is None else [weights.data, weights.scales]


def _carve(buffer: torch.Tensor, outs: Sequence[PackedWeights], n_experts: int) -> list[PackedWeights]:
    """Returns room in ``buffer`` for ``n_experts`` of each of ``outs``, one after the other."""
    rooms, at = [], 0
    for out in outs:
        parts = []
        for like in _tensors(out):
            n_bytes = n_experts * like[0].nbytes
            parts.append(buffer[at : at + n_bytes].view(like.dtype).view(n_experts, *like.shape[1:]))
            at += n_experts * _padded(like[0].nbytes)
        room = PackedWeights(out.format, out.n_in, parts[0], parts[1] if len(parts) > 1 else None)
        room.data[..., out.format.used_bytes(out.n_in) :] = 0
        rooms.append(room)
    return rooms


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
