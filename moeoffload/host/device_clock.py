"""When dense work is done: a CPU has done it when the call returns, a GPU later than the host has told it.

Of the host's time from the first dense kernel of a layer to its rows being on their way, a GPU's dense work would seem
to be the first few microseconds, and packing, which has to wait for it, all the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Watches one call of a layer's routed experts after the other. For one thread."""

    def dense_told(self) -> None:
        """The device has been told all the dense work before the call."""

    def dense_late_s(self) -> float:
        """Waits for the device; returns the seconds since `dense_told` that it still took for the dense work."""

    def wait(self) -> None:
        """Waits for all that the device was told."""


class Event(Protocol):
    """What a device passes in the order in which it is told; see ``torch.cuda.Event``."""

    def record(self) -> None:
        """Tells the device."""

    def synchronize(self) -> None:
        """Waits until the device has passed it."""

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds on the device from this event to a later one; both have been passed."""


class HostClock:
    """Of devices that are never late, and of others while nobody listens."""

    def dense_told(self) -> None:
        """See `Clock`."""

    def dense_late_s(self) -> float:
        """See `Clock`."""
        return 0.0

    def wait(self) -> None:
        """See `Clock`."""


class DeviceClock:
    """Of a GPU. Its events are made once."""

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._dense, self._now = new_event(), new_event()
        self._told_at = 0.0

    def dense_told(self) -> None:
        """See `Clock`."""
        self._dense.record()
        self._told_at = perf_counter()

    def dense_late_s(self) -> float:
        """See `Clock`. What the device has computed since is no dense work, so this is the rest of the host's time."""
        self.wait()
        since_s = perf_counter() - self._told_at
        return min(since_s, max(0.0, since_s - self._dense.elapsed_time(self._now) / 1e3))

    def wait(self) -> None:
        """See `Clock`."""
        self._now.record()
        self._now.synchronize()


class _StreamEvent:
    """An event of the stream in which a GPU computes, be that the current device or not."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        """See `Event`."""
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """See `Event`."""
        self._event.synchronize()

    def elapsed_time(self, later: _StreamEvent, /) -> float:
        """See `Event`."""
        return float(self._event.elapsed_time(later._event))


HOST_CLOCK = HostClock()


def clock_of(device: torch.device) -> Clock:
    """A clock for one thread whose dense layers are on ``device``."""
    return DeviceClock(lambda: _StreamEvent(device)) if device.type == "cuda" else HOST_CLOCK
