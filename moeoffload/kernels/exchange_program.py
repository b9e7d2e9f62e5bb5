"""A host's side of a decode step in compiled pieces: rows to a request, a reply awaited, or checked.

The request goes through shared memory or over a lane, and its reply is looked for there; or others send and receive.

All of them leave everything unusual to Python, which then does all of it once more and says what is wrong.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from moeoffload.kernels import exchange_words as xw
from moeoffload.kernels import lane_words as lw
from moeoffload.kernels.exchange_words import (
    PACK_BAD_ROW,
    PACK_HIDDEN,
    PACK_HOLDS_ALL,
    PACK_IDS,
    PACK_N_EXPERTS,
    PACK_N_HIT,
    PACK_N_ROWS,
    PACK_TABLE,
    PACK_WEIGHTS,
    PACK_WEIGHTS_ARE_F32,
    PACK_WORDS,
)
from moeoffload.kernels.frame_program import (
    BELL,
    BODY_BYTES,
    CHECK,
    HEADER_BYTES,
    HEADER_WORDS,
    KIND,
    LINE_BYTES,
    LOW,
    REPLY_BELL,
    REQUEST_ID,
    ROWS,
    TIMEOUT,
    TIMES,
    WHERE,
    c_call,
    header_crc,
    of_semaphore,
    ring_bell,
)
from moeoffload.kernels.lane_program import let_go, look_for_frame, send_frame
from moeoffload.kernels.phases import view
from moeoffload.kernels.program import compile_entry, source_stamp
from moeoffload.kernels.watch import Seen, look_for

_MOST_SPARE: Final = 8
_SEEN_NEWS: Final = int(Seen.NEWS)
_SEEN_CALLED: Final = int(Seen.CALLED)
REFUSED: Final = -1
"""Nothing was sent: Python knows why."""
_POST_ARGUMENTS: Final = 13
FiveInts = Callable[[int, int, int, int, int], int]


@intrinsic
def _run_pack(typing_context: Any, program: Any, call: Any) -> Any:
    del typing_context, program, call
    return c_call(1, types.void)


def _make_post(stamp: int) -> Callable[..., int]:
    def post(
        address: int,
        n_sent: int,
        hidden: int,
        ids: int,
        weights: int,
        n_rows: int,
        weights_are_f32: int,
        table: int,
        n_experts: int,
        holds_all: int,
        layer: int,
        request_id: int,
        timeout_us: int,
    ) -> int:
        _ = stamp
        block = view(address, np.int64, xw.BLOCK_WORDS)
        call = view(block[xw.PACK_CALL], np.int64, PACK_WORDS)
        call[PACK_HIDDEN] = hidden
        call[PACK_IDS] = ids
        call[PACK_WEIGHTS] = weights
        call[PACK_TABLE] = table
        call[PACK_N_ROWS] = n_rows
        call[PACK_N_EXPERTS] = n_experts
        call[PACK_HOLDS_ALL] = holds_all
        call[PACK_WEIGHTS_ARE_F32] = weights_are_f32
        _run_pack(block[xw.PACK], block[xw.PACK_CALL])
        n_hit = call[PACK_N_HIT]
        if n_hit == 0:
            return 0
        if n_hit < 0 or call[PACK_BAD_ROW] >= 0:
            return REFUSED
        # The reply before, should it come once more: nobody has asked for anything since.
        for _spare in range(_MOST_SPARE if block[xw.RING] != 0 else 0):
            if of_semaphore(block[xw.TRY_WAIT], block[xw.SEMAPHORE]) != 0:
                break
            block[xw.N_STALE] += 1
        header = block[xw.HEADER : xw.HEADER + HEADER_WORDS]
        header[KIND] = block[xw.HEAD]
        header[REQUEST_ID] = request_id
        header[WHERE] = block[xw.EPOCH] | (layer << 32) | (block[xw.TOP_K] << 48)
        header[ROWS] = n_hit | (weights_are_f32 << 32)
        header[BODY_BYTES] = n_hit * block[xw.ROW_BYTES]
        header[TIMEOUT] = timeout_us
        header[TIMES] = 0
        header[CHECK] = 0
        header[CHECK] = header_crc(address + xw.HEADER * 8) << 32
        frame = view(block[xw.REQUEST], np.int64, HEADER_WORDS)
        for word in range(HEADER_WORDS):
            frame[word] = header[word]
        n_bytes = HEADER_BYTES + header[BODY_BYTES]
        if block[xw.LANE] != 0:
            block[xw.SENT] = send_frame(block[xw.LANE], block[xw.REQUEST], n_bytes)
            return n_bytes
        if block[xw.RING] == 0:
            return n_bytes
        line = block[xw.RING] + n_sent % block[xw.N_SLOTS] * LINE_BYTES
        entry = view(line, np.int64, 3)
        entry[0] = block[xw.SLOT]
        entry[1] = n_bytes
        entry[2] = request_id
        if of_semaphore(block[xw.POST], block[xw.REQUEST_SEMAPHORE]) != 0:
            return REFUSED
        block[xw.SENT] = n_bytes
        ring_bell(line + BELL, n_sent + 1)
        return n_bytes

    return post


@njit(nogil=True)
def _holds_sums(address: int, request_id: int, layer: int, n_rows: int, n_bytes: int) -> bool:
    """Whether the reply of so many bytes has the sums of a request; then its bytes and times are in the block."""
    block = view(address, np.int64, xw.BLOCK_WORDS)
    frame = view(block[xw.REPLY], np.int64, HEADER_WORDS)
    header = block[xw.HEADER : xw.HEADER + HEADER_WORDS]
    for word in range(HEADER_WORDS):
        header[word] = frame[word]
    body = n_rows * block[xw.ROW_BYTES_BACK]
    if (
        n_bytes != HEADER_BYTES + body
        or header[KIND] != block[xw.HEAD_BACK]
        or header[REQUEST_ID] != request_id
        or header[WHERE] != (block[xw.EPOCH] | (layer << 32) | (block[xw.TOP_K] << 48))
        or (header[ROWS] & LOW) != n_rows
        or header[BODY_BYTES] != body
        or ((header[CHECK] >> 32) & LOW) != header_crc(address + xw.HEADER * 8)
    ):
        return False
    block[xw.N_BYTES] = n_bytes
    block[xw.TIMES] = header[TIMES]
    return True


@njit(nogil=True)
def _collect_from_lane(address: int, request_id: int, layer: int, n_rows: int, limit_ns: int) -> int:
    block = view(address, np.int64, xw.BLOCK_WORDS)
    lane = block[xw.LANE]
    seen = look_for_frame(
        lane,
        block[xw.CALL],
        limit_ns,
        block[xw.CROWDED_NS],
        block[xw.CLOCK],
        block[xw.YIELD],
        block[xw.GETRUSAGE],
    )
    if seen != _SEEN_NEWS:
        return seen
    n_bytes = view(lane, np.int64, lw.LANE_WORDS)[lw.FRAME]
    if n_bytes == 0 or not _holds_sums(address, request_id, layer, n_rows, n_bytes):
        return _SEEN_CALLED
    let_go(lane)
    block[xw.TAKEN] = 1
    return seen


def _make_collect(stamp: int) -> FiveInts:
    def collect(address: int, request_id: int, layer: int, n_rows: int, limit_ns: int) -> int:
        _ = stamp
        block = view(address, np.int64, xw.BLOCK_WORDS)
        if block[xw.LANE] != 0:
            return _collect_from_lane(address, request_id, layer, n_rows, limit_ns)
        if block[xw.RING] == 0:
            return _SEEN_CALLED
        line = block[xw.LINE]
        seen = look_for(
            line + REPLY_BELL,
            request_id,
            block[xw.CALL],
            limit_ns,
            block[xw.CROWDED_NS],
            block[xw.CLOCK],
            block[xw.YIELD],
            block[xw.GETRUSAGE],
        )
        if seen != _SEEN_NEWS:
            return seen
        announced = view(line, np.int64, 2)
        n_bytes = announced[0]
        if (
            announced[1] != request_id
            or not _holds_sums(address, request_id, layer, n_rows, n_bytes)
            or of_semaphore(block[xw.TRY_WAIT], block[xw.SEMAPHORE]) != 0
        ):
            return _SEEN_CALLED
        block[xw.TAKEN] = 1
        return seen

    return collect


def _make_accept(stamp: int) -> FiveInts:
    def accept(address: int, request_id: int, layer: int, n_rows: int, n_bytes: int) -> int:
        _ = stamp
        return _holds_sums(address, request_id, layer, n_rows, n_bytes)

    return accept


@functools.cache
def exchange_programs() -> tuple[Any, Callable[..., int], FiveInts, FiveInts]:
    """What keeps the code, and the three pieces; the first call compiles them or loads them from the on-disk cache.

    All arguments are int64, tensors and blocks their addresses (shapes: `RowPacker.pack`).

    ``post(block, n_sent, hidden, ids, weights, n_rows, weights_are_f32, table, n_experts, holds_all, layer, request_id,
    timeout_us)`` packs rows as `RowPacker` does and sends them as the n-th request of the channel, counted from 0. It
    returns the bytes of the frame, 0 if no row has an expert in the table, or ``REFUSED``. Over a LANE it may not be
    SENT, see `send_frame`. With neither that nor a RING it is made, and somebody else sends it.

    ``collect(block, request_id, layer, n_rows, limit_ns)`` looks for the sums of that request and takes them. It
    returns a `Seen`: NEWS when they are there and as they should be, CALLED when what is there is for Python to read.

    ``accept(block, request_id, layer, n_rows, n_bytes)`` says of a reply of so many bytes, which came another way,
    whether it has the sums of that request (1), or is for Python to read (0).
    """
    stamp = source_stamp()
    post = compile_entry(_make_post(stamp), types.int64, _POST_ARGUMENTS)
    collect, accept = (compile_entry(make(stamp), types.int64, 5) for make in (_make_collect, _make_accept))
    five_ints = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)
    return (
        (post, collect, accept),
        ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * _POST_ARGUMENTS)(post.address),
        five_ints(collect.address),
        five_ints(accept.address),
    )
