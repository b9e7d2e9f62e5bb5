"""Words of the block by which Python and the compiled exchange talk: int64 each, addresses included."""

from __future__ import annotations

from typing import Final

# What stays the same for a slot.
SLOT: Final = 0
RING: Final = 1
"""Address of the first of N_SLOTS lines of 64 bytes: slot, bytes, request id, bell."""
N_SLOTS: Final = 2
REQUEST_SEMAPHORE: Final = 3
REQUEST: Final = 4
REPLY: Final = 5
LINE: Final = 6
"""Address of the line that announces the reply: bytes, request id, bell."""
SEMAPHORE: Final = 7
HEAD: Final = 8
"""The first word of a request's header."""
HEAD_BACK: Final = 9
"""The first word of a reply's header."""
EPOCH: Final = 10
TOP_K: Final = 11
ROW_BYTES: Final = 12
ROW_BYTES_BACK: Final = 13
PACK: Final = 14
"""Address of the program that packs rows, and of its call block."""
PACK_CALL: Final = 15
CALL: Final = 16
"""Address of an int64 that is 0: nobody calls the thread that looks for a reply."""
CROWDED_NS: Final = 17
CLOCK: Final = 18
YIELD: Final = 19
GETRUSAGE: Final = 20
TRY_WAIT: Final = 21
POST: Final = 22

# What was done.
N_STALE: Final = 23
"""Replies that nobody has asked for, so far."""
N_BYTES: Final = 24
"""Of the last reply."""
TIMES: Final = 25
"""That the server has written into it."""

SENT: Final = 26
"""Not 0 once the request is on its way: Python may be interrupted before it learns what `post` returned. Less than 0 if
the lane has not taken it whole."""
TAKEN: Final = 27
"""Not 0 once the token of the reply is taken."""
LANE: Final = 28
"""Address of the block of the lane over which this request goes; 0 if there is none."""

HEADER: Final = 32
"""A private copy of the header: what is shared can change at any time."""
BLOCK_WORDS: Final = 40

# Words of a packer's call block.
PACK_HIDDEN: Final = 0
PACK_IDS: Final = 1
PACK_WEIGHTS: Final = 2
PACK_TABLE: Final = 3
PACK_N_ROWS: Final = 6
PACK_N_EXPERTS: Final = 9
PACK_HOLDS_ALL: Final = 10
PACK_WEIGHTS_ARE_F32: Final = 11
PACK_N_HIT: Final = 12
PACK_BAD_ROW: Final = 13
PACK_WORDS: Final = 14
