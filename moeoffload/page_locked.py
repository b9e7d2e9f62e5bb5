"""Page-locks existing buffers, so that a GPU copies to and from them by DMA."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from moeoffload.last_resort import answer_within

logger = logging.getLogger(__name__)

DRIVER_S: Final = 60.0
"""How long the driver may take; locking gigabytes takes about a second."""
_abandoned: list[PageLocked] = []
"""Objects whose buffers must stay mapped until the process ends."""


class PageLocked:
    """Keeps the memory range that spans some buffers locked for CUDA, and mapped, until it is closed.

    If it cannot be locked (the limit of lockable memory, a driver without support for shared memory), copies still
    work but are slower: the driver copies everything once more.
    """

    def __init__(self, buffers: Iterable[memoryview], device: torch.device, runtime: Any = None) -> None:
        """``buffers`` are writable and in one mapping; ``runtime`` defaults to ``torch.cuda.cudart()``."""
        self._buffers = list(buffers)
        self._device = device
        self._runtime = torch.cuda.cudart() if runtime is None else runtime
        starts = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in self._buffers]
        self._start = min(starts) // mmap.PAGESIZE * mmap.PAGESIZE
        self._n_bytes = max(at + len(buffer) for at, buffer in zip(starts, self._buffers, strict=True)) - self._start
        self.is_locked = False
        self._apart(self._lock)

    def close(self) -> None:
        """Unlocks the buffers. No copy may be in progress. Idempotent."""
        if not self.is_locked or self._apart(self._unlock):
            self._buffers.clear()

    def abandon(self) -> None:
        """Call instead of `close` if copies may be in progress: keeps the buffers locked until the process ends."""
        _abandoned.append(self)

    def _lock(self) -> None:
        error = int(self._runtime.cudaHostRegister(self._start, self._n_bytes, 0))
        self.is_locked = not error
        if error:
            logger.info("%d bytes are not page-locked for CUDA (error %d)", self._n_bytes, error)

    def _unlock(self) -> None:
        self.is_locked = False
        error = int(self._runtime.cudaHostUnregister(self._start))
        if error:
            logger.warning("page-locked memory was not given back (CUDA error %d)", error)

    def _apart(self, work: Callable[[], None]) -> bool:
        """Runs ``work`` in a separate thread: CUDA keeps an error per thread, and the thread's next kernel would raise.

        Returns False if the driver does not return in time: the buffers are then kept as they are.
        """

        def run() -> None:
            with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
                work()

        try:
            answer_within(DRIVER_S, "page-lock", run)
        except RuntimeError as error:
            logger.warning("memory is not page-locked for CUDA: %s", error)
        except TimeoutError:
            logger.warning("the CUDA driver takes more than %g s to lock or unlock memory", DRIVER_S)
            self.abandon()
            return False
        return True
