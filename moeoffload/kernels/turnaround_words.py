"""Words of the block by which Python and the compiled turnaround talk: int64 each, addresses included."""

from __future__ import annotations

from typing import Final

MOST_ROWS: Final = 8
"""Requests of more rows are left to Python."""

# Where requests come in, and replies go out.
CALL: Final = 0
"""Address of an int64: not 0 when this process has something else to do for the thread that looks."""
RING: Final = 1
"""Address of the first of N_SLOTS lines of 64 bytes: slot, bytes, request id, bell."""
N_SLOTS: Final = 2
N_READ: Final = 3
"""Requests taken off the ring so far; also written."""
SLOTS: Final = 4
"""Address of SLOT_WORDS words for each slot."""
REQUEST_SEMAPHORE: Final = 5
LIMIT_NS: Final = 6
"""Longest look for one request."""
CROWDED_NS: Final = 7
MOST: Final = 8
"""Requests after which Python has a look at the world."""

# What a request must be: words of the frame header, sizes.
HEAD: Final = 9
"""The first word of a request's header."""
HEAD_BACK: Final = 10
"""The first word of a reply's header."""
EPOCH: Final = 11
TOP_K: Final = 12
HIDDEN: Final = 13
ROW_BYTES: Final = 14
"""Of a dispatch body."""
VALUE_BYTES: Final = 15
"""Of these, a row's values."""
ROW_BYTES_BACK: Final = 16
N_LAYERS: Final = 17
LAYERS: Final = 18
"""Address of one layer block's address for each layer, 0 where Python has to compute it."""
CALLS: Final = 19
"""Address of the call blocks' addresses: weights of the compute dtype and of float32, each for 0 to MOST_ROWS rows."""
THREADS: Final = 20
"""Address of the number of threads for 0 to MOST_ROWS rows."""
ROWS_ARE_OPERANDS: Final = 21
"""Whether the kernel multiplies the rows as they lie in the frame."""

# What is called: addresses of compiled programs and of functions of the C library.
KERNEL: Final = 22
TEAM: Final = 23
CONVERT: Final = 24
"""Rows of the frame into the call's; 0 where they are read in the frame."""
UNPACK_ROUNDED: Final = 25
UNPACK_F32: Final = 26
ENCODE: Final = 27
CLOCK: Final = 28
YIELD: Final = 29
GETRUSAGE: Final = 30
TRY_WAIT: Final = 31
POST: Final = 32

# What was done so far. Times in nanoseconds.
SERVED: Final = 33
SERVED_ROWS: Final = 34
COMPUTE_NS: Final = 35
WAITED_NS: Final = 36
"""For requests that were served."""
LOOKED_SINCE: Final = 38
"""When the last look began, on the monotonic clock."""
UNSENT: Final = 37
"""Replies whose host has filled its semaphore up to the brim."""

LANE: Final = 39
"""Address of the block of a lane, for the loop that answers what comes over it."""
HEADER: Final = 40
"""A private copy of the header: what a host shares with us it can change at any time."""
OUT: Final = 48
"""Address of a buffer for replies that go over the lane."""
LEFT: Final = 49
"""Bytes of the reply in there that the lane has not taken whole; 0 if it has."""
BLOCK_WORDS: Final = 56

# A slot.
REQUEST: Final = 0
REPLY: Final = 1
LINE: Final = 2
"""Address of the line that announces its reply: bytes, request id, bell."""
SEMAPHORE: Final = 3
SLOT_WORDS: Final = 4
