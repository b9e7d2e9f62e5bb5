"""A point in a device's queue of work."""

from __future__ import annotations

import torch


class Fence:
    """A point in the work queued on a device, which the host can wait for, and for nothing behind it.

    On a CPU, where work is done when the call that asked for it returns, both methods do nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        """Sets the point behind all that is queued on the device's current stream now."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Returns when the device has come to the point; at once if it was never set."""
        if self._event is not None:
            self._event.synchronize()
