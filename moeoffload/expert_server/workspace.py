"""The arenas of one attached host.

There is one arena per shape class and layout, made once. Decode-shaped calls must not resize what prefill-shaped calls
use, nor the other way round.
"""

from __future__ import annotations

import torch

from moeoffload.expert_server.arena import DECODE_ROWS, Arena, HostArena
from moeoffload.expert_server.staging import DeviceArena
from moeoffload.wire import FrameLayout


class Workspace:
    """The arenas of one layout: one for decode- and verify-shaped calls, one for prefill-shaped ones."""

    def __init__(self, layout: FrameLayout, compute_dtype: torch.dtype, device: torch.device) -> None:
        def arena(max_rows: int) -> Arena:
            if device.type == "cpu":
                return HostArena(max_rows, layout, compute_dtype)
            return DeviceArena(max_rows, layout, compute_dtype, device)

        self._small = arena(min(DECODE_ROWS, layout.capacity))
        self._large = arena(layout.capacity)

    @property
    def n_created(self) -> int:
        """Arenas and kept views made so far."""
        return self._small.n_created + self._large.n_created

    def arena(self, n_rows: int) -> Arena:
        """The arena for a call of ``n_rows`` rows."""
        return self._small if n_rows <= DECODE_ROWS else self._large
