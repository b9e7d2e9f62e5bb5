"""The buffers of one attached host: an arena, and its frames, which are page-locked for a GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import torch

from moeoffload.errors import ServerError
from moeoffload.expert_server.arena import HostArena
from moeoffload.expert_server.staging import DeviceArena
from moeoffload.page_locked import PageLocked
from moeoffload.transport.base import ServerSlot
from moeoffload.wire import FrameLayout

logger = logging.getLogger(__name__)


class Workspace:
    """The arena of one frame layout, for calls of any size up to its capacity. Made once."""

    def __init__(self, layout: FrameLayout, compute_dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._pages: PageLocked | None = None
        self._closed = False
        self.arena: HostArena | DeviceArena
        if device.type == "cpu":
            self.arena = HostArena(layout.capacity, layout, compute_dtype)
        else:
            self.arena = DeviceArena(layout.capacity, layout, compute_dtype, device)

    @property
    def n_created(self) -> int:
        """Number of arenas and cached views made so far."""
        return self.arena.n_created

    def lock_frames(self, slots: Iterable[ServerSlot]) -> None:
        """Page-locks the slots' buffers so that a GPU can copy from and to them directly; before the first request."""
        if self._device.type != "cuda":
            return
        with self._lock:
            if not self._closed and self._pages is None:
                buffers = (buffer for slot in slots for buffer in (slot.request, slot.reply))
                self._pages = PageLocked(buffers, self._device)
                self._tell_arena(self._pages.is_locked)

    def close(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Unlocks the frames for good; ``run`` executes work while no thread computes, or raises ServerError."""
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
        self._tell_arena(False)
        self._pages.close()

    def _tell_arena(self, are_locked: bool) -> None:
        if isinstance(self.arena, DeviceArena):
            self.arena.settle()
            self.arena.frames_are_locked = are_locked
