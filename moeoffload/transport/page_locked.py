"""Page-locking buffers that exist already, so that a GPU copies into and out of them by itself."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

logger = logging.getLogger(__name__)

DRIVER_S: Final = 60.0
"""Locking gigabytes takes a second or so."""
_abandoned: list[PageLocked] = []
"""Whose buffers must stay mapped until the process ends."""


class PageLocked:
    """Keeps buffers locked for CUDA, and mapped, until it is closed.

    Where they cannot be locked (the limit of lockable memory, a driver that does not know shared memory), copies still
    work and are slower: the driver copies everything once more.
    """

    def __init__(self, buffers: Iterable[memoryview], device: torch.device, runtime: Any = None) -> None:
        """``buffers`` are writable; ``runtime`` is what ``torch.cuda.cudart()`` gives, by default."""
        self._buffers = list(buffers)
        self._device = device
        self._runtime = torch.cuda.cudart() if runtime is None else runtime
        self._locked: list[int] = []
        self.is_locked = False
        self._apart(self._lock)

    def close(self) -> None:
        """Unlocks the buffers. No copy may be under way. Idempotent."""
        self.is_locked = False
        if not self._locked or self._apart(self._unlock):
            self._buffers.clear()

    def abandon(self) -> None:
        """Instead of `close`, if copies may be under way: keeps the buffers as they are until the process ends."""
        _abandoned.append(self)

    def _lock(self) -> None:
        for start, end in _pages(self._buffers):
            error = int(self._runtime.cudaHostRegister(start, end - start, 0))
            if error:
                logger.info("%d bytes are not page-locked for CUDA (error %d)", end - start, error)
                self._unlock()
                return
            self._locked.append(start)
        self.is_locked = True

    def _unlock(self) -> None:
        while self._locked:
            error = int(self._runtime.cudaHostUnregister(self._locked.pop()))
            if error:
                logger.warning("page-locked memory was not given back (CUDA error %d)", error)

    def _apart(self, work: Callable[[], None]) -> bool:
        """Does it in a thread of its own: CUDA remembers a thread's error, and its next kernel would raise.

        False if the driver does not come back: then the buffers are kept as they are.
        """

        def run() -> None:
            try:
                with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
                    work()
            except RuntimeError as error:
                logger.warning("memory is not page-locked for CUDA: %s", error)

        thread = threading.Thread(target=run, name="page-lock", daemon=True)
        thread.start()
        thread.join(DRIVER_S)
        if not thread.is_alive():
            return True
        logger.warning("the CUDA driver takes more than %g s to lock or unlock memory", DRIVER_S)
        self.abandon()
        return False


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
