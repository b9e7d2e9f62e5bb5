"""Words of the block of a lane, a TCP connection for small frames: int64 each, addresses included."""

from __future__ import annotations

from typing import Final

DESCRIPTOR: Final = 0
BUFFER: Final = 1
"""Where the frame that comes in is put."""
ROOM: Final = 2
"""Bytes of it; less than a header if no frame is expected."""
HAVE: Final = 3
"""Bytes that are there, of the frame, or of the box that it comes in."""
FRAME: Final = 4
"""Bytes of the frame, once it is there as a whole; else 0."""
ENDED: Final = 5
"""Not 0 once nothing more can come: the other side is gone, or does not keep to the rules."""
MOST: Final = 6
"""Bytes of the longest frame that the other side takes."""

# Of a lane whose frames are sealed.
KEY: Final = 7
"""Address of the 32 bytes that both sides know; 0 for a lane in the clear."""
SIDE: Final = 8
"""0 on the host, 1 on the server."""
BOX_IN: Final = 9
"""Address of the box that comes in: room for ROOM bytes and what a seal adds."""
BOX_OUT: Final = 10
"""Address of the one that goes out, as much for MOST bytes."""
N_IN: Final = 11
"""Boxes so far."""
N_OUT: Final = 12

# Functions of the C library and of libsodium.
SEND: Final = 13
RECV: Final = 14
SEAL: Final = 15
OPEN: Final = 16
NONCE: Final = 17
"""Three words."""
LANE_WORDS: Final = 24
