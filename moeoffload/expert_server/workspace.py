"""The arenas of one attached host.

There is one arena per shape class and layout, made once. Decode-shaped calls must not resize what prefill-shaped calls
use, nor the other way round.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import torch

from moeoffload.errors import ServerError
from moeoffload.expert_server.arena import DECODE_ROWS, Arena, HostArena
from moeoffload.expert_server.staging import DeviceArena
from moeoffload.transport.base import ServerSlot
from moeoffload.transport.page_locked import PageLocked
from moeoffload.wire import FrameLayout

logger = logging.getLogger(__name__)


class Workspace:
    """The arenas of one layout: one for decode- and verify-shaped calls, one for prefill-shaped ones."""

    def __init__(self, layout: FrameLayout, compute_dtype: torch.dtype, device: torch.device) -> None:
        def arena(max_rows: int) -> Arena:
            if device.type == "cpu":
                return HostArena(max_rows, layout, compute_dtype)
            return DeviceArena(max_rows, layout, compute_dtype, device)

        self._device = device
        self._lock = threading.Lock()
        self._pages: PageLocked | None = None
        self._closed = False
        self._small = arena(min(DECODE_ROWS, layout.capacity))
        self._large = arena(layout.capacity)

    @property
    def n_created(self) -> int:
        """Arenas and kept views made so far."""
        return self._small.n_created + self._large.n_created

    def lock_frames(self, slots: Iterable[ServerSlot]) -> None:
        """Lets a GPU copy out of and into the slots' buffers by itself, from now on; before the first request."""
        if self._device.type != "cuda":
            return
        with self._lock:
            if not self._closed and self._pages is None:
                buffers = (buffer for slot in slots for buffer in (slot.request, slot.reply))
                self._pages = PageLocked(buffers, self._device)
                self._tell_arenas(self._pages.is_locked)

    def close(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Gives the buffers back, for good; ``run`` does work while nobody computes, or raises ServerError."""
        with self._lock:
            self._closed = True
        if self._pages is None:
            return
        try:
            run(self._unlock_frames)
        except (ServerError, RuntimeError) as error:  # the device is still at work, or may have failed for good
            logger.warning("buffers of a lease are kept until this server ends: %s", error)
            self._pages.abandon()

    def _unlock_frames(self) -> None:
        assert self._pages is not None
        self._tell_arenas(False)
        self._pages.close()

    def _tell_arenas(self, are_locked: bool) -> None:
        for arena in (self._small, self._large):
            if isinstance(arena, DeviceArena):
                arena.settle()
                arena.frames_are_locked = are_locked

    def arena(self, n_rows: int) -> Arena:
        """The arena for a call of ``n_rows`` rows."""
        return self._small if n_rows <= DECODE_ROWS else self._large
