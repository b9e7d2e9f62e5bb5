"""Frames over a TCP connection, in compiled code: sent at once or not, and looked for without sleeping.

At most one frame is on its way in each direction (see `moeoffload.transport.lane`), so whatever can be read belongs to
it: one call of the system for each frame. In the clear a frame lies on the wire as it is; sealed it comes in a box of
libsodium (``crypto_box_easy_afternm``: XSalsa20-Poly1305 under the key that both key pairs agree on), after the box's
length in 8 bytes. The nonce is the number of the box and its direction: none comes twice under the key of one attach,
and a box that was changed, repeated, left out or sent back does not open.
"""

from __future__ import annotations

import ctypes
import functools
import socket
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

SEAL_BYTES: Final = 16
LENGTH_BYTES: Final = 8
BOX_BYTES: Final = SEAL_BYTES + LENGTH_BYTES
"""What sealing adds to a frame."""
_NO_SIGNAL: Final = int(getattr(socket, "MSG_NOSIGNAL", 0))
"""A program that does not ignore SIGPIPE would end when the other side has."""
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


@intrinsic
def _box(typing_context: Any, function: Any, to: Any, of: Any, n_bytes: Any, nonce: Any, key: Any) -> Any:
    """``crypto_box_easy_afternm`` or ``crypto_box_open_easy_afternm``; 0 if it went well."""
    del typing_context, function, to, of, n_bytes, nonce, key
    return c_call(5, types.int32)


@njit(nogil=True)
def _nonce_of(lane: int, number: int, side: int) -> int:
    block = view(lane, np.int64, lw.LANE_WORDS)
    block[lw.NONCE], block[lw.NONCE + 1], block[lw.NONCE + 2] = number, side, 0
    return lane + lw.NONCE * 8


@njit(nogil=True)
def send_frame(lane: int, frame: int, n_bytes: int) -> int:
    """Sends the frame at an address; returns its bytes, or 0 if it is longer than the other side takes.

    -1 if it was not taken whole at once: the lane is out of step then, or broken, and of no use any more.
    """
    block = view(lane, np.int64, lw.LANE_WORDS)
    if n_bytes > block[lw.MOST]:
        return 0
    out, n_out = frame, n_bytes
    if block[lw.KEY] != 0:
        out, n_out = block[lw.BOX_OUT], n_bytes + BOX_BYTES
        view(out, np.int64, 1)[0] = n_bytes + SEAL_BYTES
        nonce = _nonce_of(lane, block[lw.N_OUT], block[lw.SIDE])
        block[lw.N_OUT] += 1
        if _box(block[lw.SEAL], out + LENGTH_BYTES, frame, n_bytes, nonce, block[lw.KEY]) != 0:
            return -1
    return n_bytes if _transfer(block[lw.SEND], block[lw.DESCRIPTOR], out, n_out, _NO_SIGNAL) == n_out else -1


@njit(nogil=True)
def _find_frame(lane: int) -> int:
    """Bytes of the frame in the buffer if all of it is there, 0 if not yet, -1 if it breaks the rules."""
    block = view(lane, np.int64, lw.LANE_WORDS)
    have = block[lw.HAVE]
    if have < HEADER_BYTES:
        return 0
    body = view(block[lw.BUFFER], np.int64, HEADER_WORDS)[BODY_BYTES]
    if body < 0 or body > block[lw.ROOM] - HEADER_BYTES or have > HEADER_BYTES + body:
        return -1
    return HEADER_BYTES + body if have == HEADER_BYTES + body else 0


@njit(nogil=True)
def _open_frame(lane: int) -> int:
    """As `_find_frame`, of the box that has come in, which is opened."""
    block = view(lane, np.int64, lw.LANE_WORDS)
    have, box = block[lw.HAVE], block[lw.BOX_IN]
    if have < LENGTH_BYTES:
        return 0
    n_sealed = view(box, np.int64, 1)[0]
    n_bytes = n_sealed - SEAL_BYTES
    if n_bytes < HEADER_BYTES or n_bytes > block[lw.ROOM] or have > n_sealed + LENGTH_BYTES:
        return -1
    if have < n_sealed + LENGTH_BYTES:
        return 0
    nonce = _nonce_of(lane, block[lw.N_IN], 1 - block[lw.SIDE])
    block[lw.N_IN] += 1
    if _box(block[lw.OPEN], block[lw.BUFFER], box + LENGTH_BYTES, n_sealed, nonce, block[lw.KEY]) != 0:
        return -1
    body = view(block[lw.BUFFER], np.int64, HEADER_WORDS)[BODY_BYTES]
    return n_bytes if body == n_bytes - HEADER_BYTES else -1


@njit(nogil=True)
def take_in(lane: int) -> bool:
    """Reads what has come; whether there is news: a whole frame, or the end of the lane."""
    block = view(lane, np.int64, lw.LANE_WORDS)
    if block[lw.FRAME] != 0 or block[lw.ENDED] != 0:
        return True
    sealed = block[lw.KEY] != 0
    buffer, room = block[lw.BUFFER], block[lw.ROOM]
    if sealed:
        buffer, room = block[lw.BOX_IN], room + BOX_BYTES
    n_bytes = _transfer(block[lw.RECV], block[lw.DESCRIPTOR], buffer + block[lw.HAVE], room - block[lw.HAVE], 0)
    if n_bytes < 0:  # nothing there; or an error, which is told once: the next call returns 0, as at the end
        return False
    block[lw.HAVE] += n_bytes
    found = 0
    if n_bytes > 0:
        found = _open_frame(lane) if sealed else _find_frame(lane)
    if n_bytes == 0 or found < 0:
        block[lw.ENDED] = 1
    else:
        block[lw.FRAME] = found
    return block[lw.FRAME] != 0 or block[lw.ENDED] != 0


@njit(nogil=True)
def let_go(lane: int) -> None:
    """The frame was read; its place is free for the next one."""
    block = view(lane, np.int64, lw.LANE_WORDS)
    block[lw.HAVE] = block[lw.FRAME] = 0


@njit(nogil=True)
def look_for_frame(
    lane: int, call: int, limit_ns: int, crowded_ns: int, clock: int, yield_: int, getrusage: int
) -> int:
    """Looks until there is a whole frame, the lane has ended, or the int64 at ``call`` is not 0; returns a `Seen`."""
    if take_in(lane):
        return _NEWS
    displaced = times_displaced(getrusage)
    started = before = clock_ns(clock)
    rounds = 0
    while True:
        if take_in(lane):
            return _NEWS
        if finished(call) != 0:
            return _CALLED
        call_address(yield_)
        now = clock_ns(clock)
        if now - before > crowded_ns and times_displaced(getrusage) != displaced:
            # Perhaps it was the peer who had the core, and was quick.
            return _NEWS if take_in(lane) else _CROWDED
        rounds += 1
        if rounds % _ROUNDS == 0:
            displaced = times_displaced(getrusage)
        if now - started > limit_ns:
            return _NOTHING
        before = now


def _make_receive(stamp: int) -> Callable[[int], int]:
    def receive(lane: int) -> int:
        _ = stamp
        take_in(lane)
        block = view(lane, np.int64, lw.LANE_WORDS)
        return block[lw.FRAME] if block[lw.FRAME] != 0 else -block[lw.ENDED]

    return receive


def _make_send(stamp: int) -> Callable[[int, int, int], int]:
    def send(lane: int, frame: int, n_bytes: int) -> int:
        _ = stamp
        return send_frame(lane, frame, n_bytes)

    return send


@functools.cache
def lane_programs() -> tuple[Any, Callable[[int], int], Callable[[int, int, int], int]]:
    """What keeps the code, and two functions of a lane's address.

    ``receive(lane)`` reads what has come: the bytes of the frame that is there, 0 if that is not whole yet, or -1 if
    none will come any more. ``send(lane, frame, n_bytes)``: see `send_frame`.
    """
    stamp = source_stamp()
    receive, send = compile_entry(_make_receive(stamp), types.int64), compile_entry(_make_send(stamp), types.int64, 3)
    int64 = ctypes.c_int64
    return (
        (receive, send),
        ctypes.CFUNCTYPE(int64, int64)(receive.address),
        ctypes.CFUNCTYPE(int64, int64, int64, int64)(send.address),
    )
