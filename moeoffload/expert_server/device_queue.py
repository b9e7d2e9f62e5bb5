"""Queues of work on a device, and points in them that other queues or the host can wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Point:
    """A point in the work queued on a device. On a CPU, where work is done when the call returns, it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Returns when the device has come to the point, whatever is queued behind it; at once if it was never set."""
        if self.event is not None:
            self.event.synchronize()


class Queue(Protocol):
    """Work that a device does in order."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy, to another dtype or device if they differ. Both stay as they are until it is done."""

    def mark(self, point: Point) -> None:
        """Sets the point behind all that is queued now."""

    def follow(self, point: Point) -> None:
        """What is queued from now on waits for the point, as it is set now."""


class DeviceQueue:
    """A stream of a CUDA device: one of its own, or the one that is current when something is queued."""

    def __init__(self, device: torch.device, *, own: bool) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._own = torch.cuda.Stream(device) if own and self._is_gpu else None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Queue`."""
        if not self._is_gpu:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream()):
            target.copy_(source, non_blocking=True)

    def mark(self, point: Point) -> None:
        """See `Queue`."""
        if point.event is not None:
            point.event.record(self._stream())

    def follow(self, point: Point) -> None:
        """See `Queue`."""
        if point.event is not None:
            self._stream().wait_event(point.event)

    def _stream(self) -> torch.cuda.Stream:
        return self._own or torch.cuda.current_stream(self._device)


class Queues:
    """The queues of one arena: copies in both directions beside the kernels, whose queue is the current one."""

    def __init__(
        self,
        device: torch.device,
        *,
        queue: Callable[..., Queue] = DeviceQueue,
        point: Callable[[torch.device], Point] = Point,
    ) -> None:
        self.inbound = queue(device, own=True)
        self.outbound = queue(device, own=True)
        self.compute = queue(device, own=False)
        self.point = point
