"""Page-locking buffers that exist already, so that a GPU copies into and out of them by itself."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterable
from typing import Any

import torch

logger = logging.getLogger(__name__)


class PageLocked:
    """Keeps buffers locked for CUDA, and mapped, until it is closed.

    Where they cannot be locked (the limit of lockable memory, a driver that does not know shared memory), copies still
    work and are slower: the driver copies everything once more.
    """

    def __init__(self, buffers: Iterable[memoryview], runtime: Any = None) -> None:
        """``buffers`` are writable; ``runtime`` is what ``torch.cuda.cudart()`` gives, by default."""
        self._buffers = list(buffers)
        self._runtime = torch.cuda.cudart() if runtime is None else runtime
        self._locked: list[int] = []
        self.is_locked = True
        for start, end in _pages(self._buffers):
            error = int(self._runtime.cudaHostRegister(start, end - start, 0))
            if error:
                logger.info("%d bytes are not page-locked for CUDA (error %d)", end - start, error)
                self.close()
                return
            self._locked.append(start)

    def close(self) -> None:
        """Unlocks the buffers. No copy may be under way. Idempotent."""
        self.is_locked = False
        while self._locked:
            error = int(self._runtime.cudaHostUnregister(self._locked.pop()))
            if error:
                logger.warning("page-locked memory was not given back (CUDA error %d)", error)
        self._buffers.clear()


def _pages(buffers: Iterable[memoryview]) -> list[tuple[int, int]]:
    """Addresses of the whole pages that buffers lie in, without overlaps, which CUDA would refuse."""
    size = mmap.PAGESIZE
    ranges: list[tuple[int, int]] = []
    for start, end in sorted(_span(buffer) for buffer in buffers if buffer.nbytes):
        first, last = start // size * size, -(-end // size) * size
        if ranges and first <= ranges[-1][1]:
            first, last = ranges[-1][0], max(last, ranges.pop()[1])
        ranges.append((first, last))
    return ranges


def _span(buffer: memoryview) -> tuple[int, int]:
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return start, start + buffer.nbytes
