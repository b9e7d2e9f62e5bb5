"""What a server allows each host."""

from __future__ import annotations

from typing import Final, Protocol

from moeoffload.transport.base import ChannelSizes, Deliver, ServerChannel

RETRY_AFTER_S: Final = 1.0
"""When a host that found no room may ask again."""
LEAST_ROWS: Final = 32
ROWS_FOR_OTHERS: Final = 128
"""No host takes the room for these rows, unless it is the last that there is."""


class ChannelFactory(Protocol):
    """Opens the server's end of a transport; the server has one per transport it is willing to use."""

    def __call__(self, sizes: ChannelSizes, deliver: Deliver, key: str) -> ServerChannel:
        """The open end, delivering requests to ``deliver``, for the host that has the secret half of ``key``."""


def rows_that_fit(room_bytes: int, row_bytes: int) -> int:
    """Rows of a host's batches: later hosts share its experts, but need some room for batches of their own."""
    rows = max(0, room_bytes) // row_bytes
    return max(rows - ROWS_FOR_OTHERS, min(rows, LEAST_ROWS))
