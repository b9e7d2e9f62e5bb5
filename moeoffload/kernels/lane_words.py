"""Words of the block of a lane, a TCP connection for small frames: int64 each, addresses included."""

from __future__ import annotations

from typing import Final

DESCRIPTOR: Final = 0
BUFFER: Final = 1
"""Where the frame that comes in is put."""
ROOM: Final = 2
"""Bytes of it; less than a header if no frame is expected."""
HAVE: Final = 3
"""Bytes of the frame that are there."""
ENDED: Final = 4
"""Not 0 once nothing more can come: the other side is gone, or does not keep to the rules."""
SEND: Final = 5
"""Addresses of the functions of the C library."""
RECV: Final = 6
MOST: Final = 7
"""Bytes of the longest frame that the other side takes."""
LANE_WORDS: Final = 8
