"""When dense work is done: a CPU has done it when the call returns, a GPU later than the host has told it.

Of the host's time from the first dense kernel of a layer to its rows being on their way, a GPU's dense work would seem
to be the first few microseconds, and packing, which has to wait for it, all the rest.
"""

from __future__ import annotations

from time import perf_counter
from typing import Final

import torch


class Clock:
    """Watches one call of a layer's routed experts after the other. For one thread.

    This one is for devices that are never late, and for others while nobody listens.
    """

    def dense_told(self) -> None:
        """The device has been told all the dense work before the call."""

    def dense_late_s(self) -> float:
        """Waits for the device; returns the seconds since `dense_told` that it still took for the dense work."""
        return 0.0

    def wait(self) -> None:
        """Waits for all that the device was told."""


class DeviceClock(Clock):
    """Of a GPU, be that the current device or not. Its events are made once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._dense, self._now = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._told_at = 0.0

    def dense_told(self) -> None:
        """See `Clock`."""
        self._dense.record(torch.cuda.current_stream(self._device))
        self._told_at = perf_counter()

    def dense_late_s(self) -> float:
        """See `Clock`. What the device has computed since is no dense work, so this is the rest of the host's time."""
        self.wait()
        since_s = perf_counter() - self._told_at
        return min(since_s, max(0.0, since_s - self._dense.elapsed_time(self._now) / 1e3))

    def wait(self) -> None:
        """See `Clock`."""
        self._now.record(torch.cuda.current_stream(self._device))
        self._now.synchronize()


HOST_CLOCK: Final = Clock()


def clock_of(device: torch.device) -> Clock:
    """A clock for one thread whose dense layers are on ``device``."""
    return DeviceClock(device) if device.type == "cuda" else HOST_CLOCK
