"""Page-locked memory through which weights go to a GPU: readers fill one buffer while the other is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Self, cast

import torch

from moeoffload.formats import PackedWeights
from moeoffload.huge_pages import empty_weights
from moeoffload.page_locked import PageLocked

BUFFER_BYTES: Final = 64 << 20
"""Of each of the two; an expert that is larger has a buffer of its size."""
_ALIGNMENT: Final = 64
Pair = tuple[torch.Tensor, torch.Tensor]
"""Where bytes go, and where they come from."""


class CopyBuffers:
    """Two buffers, made when a GPU's weights are first read and given back by `close`; for one thread at a time.

    Where they cannot be page-locked, which is logged, the driver copies everything once more.
    """

    def __init__(self, n_bytes: int = BUFFER_BYTES) -> None:
        self._n_bytes = n_bytes
        self._buffers: tuple[torch.Tensor, ...] = ()
        self._pages: PageLocked | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._waits: list[Callable[[], object] | None] = [None, None]
        """For the copy out of each buffer that is under way."""
        self._turn = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def serve(self, device: torch.device) -> bool:
        """Whether weights of this device go through the buffers."""
        return device.type == "cuda"

    def in_parts(
        self, outs: Sequence[PackedWeights], experts: Sequence[int]
    ) -> Iterator[tuple[list[PackedWeights], Sequence[int]]]:
        """Those of ``experts`` that go into one buffer, with room for them there, until all had their turn.

        ``outs`` have room for all of them on one device, not in tiles. What was written to a part's room begins to be
        copied there when the next part is asked for; `settle` waits for it.
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
        for turn, wait in enumerate(self._waits):
            self._waits[turn] = None
            if wait is not None:
                wait()

    def close(self) -> None:
        """Waits for all copies and gives the memory back. Idempotent."""
        self.settle()
        if self._pages is not None:
            self._pages.close()
        self._pages, self._buffers = None, ()
        self._streams.clear()

    def _free_buffer(self) -> torch.Tensor:
        """The other buffer, when nothing is copied out of it any more."""
        self._turn = 1 - self._turn
        wait, self._waits[self._turn] = self._waits[self._turn], None
        if wait is not None:
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
        """Copies wait for what the device was given to do so far: it may still use what was in the same memory."""
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))

    def _start(self, pairs: Iterable[Pair], device: torch.device) -> Callable[[], object]:
        """Begins to copy; returns what waits for the end."""
        done = torch.cuda.Event()
        with torch.cuda.stream(self._streams[device]):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            done.record()
        return done.synchronize


def _tensors(weights: PackedWeights) -> list[torch.Tensor]:
    return [weights.data] if weights.scales is None else [weights.data, weights.scales]


def _carve(buffer: torch.Tensor, outs: Sequence[PackedWeights], n_experts: int) -> list[PackedWeights]:
    """Room for ``n_experts`` of each of ``outs``, one after the other."""
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
