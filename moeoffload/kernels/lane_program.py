"""Frames over a TCP connection, in compiled code: sent whole or not, and looked for without sleeping.

At most one frame is on its way in each direction (see `moeoffload.transport.lane`), so whatever can be read belongs to
it: one call of the system for each frame.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from moeoffload.kernels import lane_words as lw
from moeoffload.kernels.frame_program import BODY_BYTES, HEADER_BYTES, HEADER_WORDS, c_call
from moeoffload.kernels.phases import view
from moeoffload.kernels.program import compile_entry, source_stamp
from moeoffload.kernels.vector_ir import call_address, finished
from moeoffload.kernels.watch import Seen, clock_ns, times_displaced

_ROUNDS: Final = 64
"""Looks between two questions to the system whether others had the core."""
_NOTHING: Final = int(Seen.NOTHING)
_NEWS: Final = int(Seen.NEWS)
_CROWDED: Final = int(Seen.CROWDED)
_CALLED: Final = int(Seen.CALLED)


@intrinsic
def _transfer(typing_context: Any, function: Any, descriptor: Any, buffer: Any, n_bytes: Any, flags: Any) -> Any:
    """``send`` or ``recv``."""
    del typing_context, function, descriptor, buffer, n_bytes, flags
    return c_call(4, types.int64)


@njit(nogil=True)
def send_frame(lane: int, frame: int, n_bytes: int) -> int:
    """Sends as much of the frame at an address as is taken at once; returns how many bytes that is.

    None of one that is longer than the other side takes.
    """
    block = view(lane, np.int64, lw.LANE_WORDS)
    if n_bytes > block[lw.MOST]:
        return 0
    return max(0, _transfer(block[lw.SEND], block[lw.DESCRIPTOR], frame, n_bytes, 0))


@njit(nogil=True)
def frame_here(lane: int) -> int:
    """Bytes of the frame that is there as a whole, or 0. What breaks the rules ends the lane."""
    block = view(lane, np.int64, lw.LANE_WORDS)
    have = block[lw.HAVE]
    if have < HEADER_BYTES:
        return 0
    body = view(block[lw.BUFFER], np.int64, HEADER_WORDS)[BODY_BYTES]
    if body < 0 or body > block[lw.ROOM] - HEADER_BYTES or have > HEADER_BYTES + body:
        block[lw.ENDED] = 1
        return 0
    return HEADER_BYTES + body if have == HEADER_BYTES + body else 0


@njit(nogil=True)
def _take_in(lane: int) -> bool:
    """Reads what has come; whether there is news: a whole frame, or the end of the lane."""
    block = view(lane, np.int64, lw.LANE_WORDS)
    room = block[lw.ROOM] - block[lw.HAVE]
    if room <= 0:
        return True
    n_bytes = _transfer(block[lw.RECV], block[lw.DESCRIPTOR], block[lw.BUFFER] + block[lw.HAVE], room, 0)
    if n_bytes < 0:  # nothing there; or an error, and then there is nothing more to read at the next look
        return False
    if n_bytes == 0:
        block[lw.ENDED] = 1
        return True
    block[lw.HAVE] += n_bytes
    return frame_here(lane) != 0 or block[lw.ENDED] != 0


@njit(nogil=True)
def look_for_frame(
    lane: int, call: int, limit_ns: int, crowded_ns: int, clock: int, yield_: int, getrusage: int
) -> int:
    """Looks until there is a whole frame, the lane has ended, or the int64 at ``call`` is not 0; returns a `Seen`."""
    block = view(lane, np.int64, lw.LANE_WORDS)
    if frame_here(lane) != 0 or block[lw.ENDED] != 0:
        return _NEWS
    displaced = times_displaced(getrusage)
    started = before = clock_ns(clock)
    rounds = 0
    while True:
        if _take_in(lane):
            return _NEWS
        if finished(call) != 0:
            return _CALLED
        call_address(yield_)
        now = clock_ns(clock)
        if now - before > crowded_ns and times_displaced(getrusage) != displaced:
            # Perhaps it was the peer who had the core, and was quick.
            return _NEWS if _take_in(lane) else _CROWDED
        rounds += 1
        if rounds % _ROUNDS == 0:
            displaced = times_displaced(getrusage)
        if now - started > limit_ns:
            return _NOTHING
        before = now


def _make_receive(stamp: int) -> Callable[[int], int]:
    def receive(lane: int) -> int:
        _ = stamp
        block = view(lane, np.int64, lw.LANE_WORDS)
        if frame_here(lane) == 0 and block[lw.ENDED] == 0:
            _take_in(lane)
        n_bytes = frame_here(lane)
        return n_bytes if n_bytes != 0 else -block[lw.ENDED]

    return receive


@functools.cache
def receive_program() -> tuple[Any, Callable[[int], int]]:
    """What keeps the code, and a function that reads what has come over the lane at an address.

    It returns the bytes of the frame that is there, 0 if that is not whole yet, or -1 if none will come any more.
    """
    compiled = compile_entry(_make_receive(source_stamp()), types.int64)
    return compiled, ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(compiled.address)
