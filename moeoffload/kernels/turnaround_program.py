"""From frame to frame without Python; and from look to reply, for a server that one host has to itself.

Beside the experts' weights, which pass through its caches with every request, a process finds little of itself in there
when the next one comes: each function of Python on the way then costs microseconds. This loop is a few kilobytes. It
looks for the next request in shared memory or on a lane, checks the header, computes and replies; whatever is unusual
about a request it leaves where it is, for Python to take it from the beginning.
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
from moeoffload.kernels import turnaround_words as tw
from moeoffload.kernels import words
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
    ROWS,
    SHORT,
    TIMES,
    WHERE,
    c_call,
    header_crc,
    of_semaphore,
    ring_bell,
)
from moeoffload.kernels.lane_program import let_go, look_for_frame, send_frame
from moeoffload.kernels.phases import view
from moeoffload.kernels.program import ALL_GROUPS, ITEM_GROUPS, compile_entry, source_stamp
from moeoffload.kernels.vector_ir import finished
from moeoffload.kernels.watch import Seen, clock_ns, look_for

_ROUTE_BYTES: Final = 4
"""Of a weight in the frame; slots follow the weights."""
_ALL_PHASES: Final = words.PLAN_PHASE | words.COMPUTE_PHASES
_SEEN_NEWS: Final = int(Seen.NEWS)
_SEEN_CALLED: Final = int(Seen.CALLED)


@intrinsic
def _run_kernel(typing_context: Any, program: Any, call: Any) -> Any:
    del typing_context, program, call
    return c_call(1, types.void)


@intrinsic
def _run_team(typing_context: Any, team: Any, program: Any, call: Any, n_threads: Any, flags: Any) -> Any:
    del typing_context, team, program, call, n_threads, flags
    return c_call(4, types.void)


@intrinsic
def _convert(typing_context: Any, program: Any, rows: Any, out: Any, count: Any) -> Any:
    del typing_context, program, rows, out, count
    return c_call(3, types.void)


@intrinsic
def _unpack(typing_context: Any, program: Any, slots: Any, wide: Any, weights: Any, out: Any, count: Any) -> Any:
    del typing_context, program, slots, wide, weights, out, count
    return c_call(5, types.void)


@intrinsic
def _encode(typing_context: Any, program: Any, sums: Any, out: Any, n_rows: Any, width: Any) -> Any:
    del typing_context, program, sums, out, n_rows, width
    return c_call(4, types.int64)


@njit(nogil=True)
def _call_of(block: Any, header: Any, n_bytes: int) -> int:
    """Address of the call block for a request with this header; 0 if Python has to say what is to be done with it."""
    n_rows = header[ROWS] & LOW
    if (
        header[KIND] != block[tw.HEAD]
        or (header[WHERE] & LOW) != block[tw.EPOCH]
        or ((header[WHERE] >> 48) & SHORT) != block[tw.TOP_K]
        or n_rows < 1
        or n_rows > tw.MOST_ROWS
        or header[BODY_BYTES] != n_rows * block[tw.ROW_BYTES]
        or n_bytes != HEADER_BYTES + header[BODY_BYTES]
    ):
        return 0
    layer = (header[WHERE] >> 32) & SHORT
    if layer >= block[tw.N_LAYERS]:
        return 0
    weights_are_f32 = (header[ROWS] >> 32) & 1
    calls = view(block[tw.CALLS], np.int64, 2 * (tw.MOST_ROWS + 1))
    address = calls[weights_are_f32 * (tw.MOST_ROWS + 1) + n_rows]
    layer_block = view(block[tw.LAYERS], np.int64, block[tw.N_LAYERS])[layer]
    if address == 0 or layer_block == 0:
        return 0
    call = view(address, np.int64, words.CALL_WORDS)
    call[words.LAYER] = layer_block
    return address


@njit(nogil=True)
def _compute(block: Any, call_address: int, body: int, reply: int) -> bool:
    """Computes the rows of a dispatch body into a combine body; whether slots and sums were good."""
    call = view(call_address, np.int64, words.CALL_WORDS)
    n_rows, n_routes = call[words.N_ROWS], call[words.N_ROWS] * block[tw.TOP_K]
    weights = body + n_rows * block[tw.VALUE_BYTES]
    unpack = block[tw.UNPACK_F32] if call[words.WEIGHTS_ARE_F32] else block[tw.UNPACK_ROUNDED]
    # Slots are checked by the kernel: they must not change afterwards.
    _unpack(unpack, weights + n_routes * _ROUTE_BYTES, call[words.SLOTS], weights, call[words.WEIGHTS], n_routes)
    if block[tw.CONVERT] != 0:
        _convert(block[tw.CONVERT], body, call[words.ROWS], n_rows * block[tw.HIDDEN])
    else:
        call[words.ROWS] = body
        if block[tw.ROWS_ARE_OPERANDS]:
            call[words.OPERANDS] = body
    n_threads = view(block[tw.THREADS], np.int64, tw.MOST_ROWS + 1)[n_rows]
    call[words.ITEM_GROUPS] = ALL_GROUPS
    if n_threads == 1 or block[tw.TEAM] == 0:
        call[words.PHASES] = _ALL_PHASES
        _run_kernel(block[tw.KERNEL], call_address)
    else:
        call[words.PHASES] = words.PLAN_PHASE
        _run_kernel(block[tw.KERNEL], call_address)
        if call[words.BAD_ROUTE] < 0:
            call[words.PHASES] = words.COMPUTE_PHASES
            call[words.YIELD] = block[tw.YIELD]
            call[words.ITEM_GROUPS] = ITEM_GROUPS
            _run_team(block[tw.TEAM], block[tw.KERNEL], call_address, n_threads, 0)
    if call[words.BAD_ROUTE] >= 0:
        return False
    return _encode(block[tw.ENCODE], call[words.OUT], reply, n_rows, block[tw.HIDDEN]) < 0


@njit(nogil=True)
def _reply_to(address: int, request: int, n_bytes: int, reply: int, queue_ns: int, received: int) -> int:
    """Answers a frame by another one; returns its bytes, or 0 if that is left to Python, and nothing was done."""
    block = view(address, np.int64, tw.BLOCK_WORDS)
    frame = view(request, np.int64, HEADER_WORDS)
    header = block[tw.HEADER : tw.HEADER + HEADER_WORDS]
    for word in range(HEADER_WORDS):
        header[word] = frame[word]
    header_address = address + tw.HEADER * 8
    call_address = _call_of(block, header, n_bytes)
    if call_address == 0 or header_crc(header_address) != ((header[CHECK] >> 32) & LOW):
        return 0
    if not _compute(block, call_address, request + HEADER_BYTES, reply + HEADER_BYTES):
        return 0
    n_rows = header[ROWS] & LOW
    took = clock_ns(block[tw.CLOCK]) - received
    header[KIND] = block[tw.HEAD_BACK]
    header[BODY_BYTES] = n_rows * block[tw.ROW_BYTES_BACK]
    header[TIMES] = min(queue_ns // 1000, LOW) | (min(took // 1000, LOW) << 32)
    header[CHECK] = 0
    header[CHECK] = header_crc(header_address) << 32
    answer = view(reply, np.int64, HEADER_WORDS)
    for word in range(HEADER_WORDS):
        answer[word] = header[word]
    block[tw.SERVED] += 1
    block[tw.SERVED_ROWS] += n_rows
    block[tw.COMPUTE_NS] += took
    return HEADER_BYTES + header[BODY_BYTES]


@njit(nogil=True)
def _answer(address: int, line: int, received: int) -> bool:
    """Answers the request that a line of the ring announces; False if that is left to Python, and nothing was done."""
    block = view(address, np.int64, tw.BLOCK_WORDS)
    entry = view(line, np.int64, 3)
    index, n_bytes, request_id = entry[0], entry[1], entry[2]
    if index < 0 or index >= block[tw.N_SLOTS]:
        return False
    slot = view(block[tw.SLOTS] + index * tw.SLOT_WORDS * 8, np.int64, tw.SLOT_WORDS)
    # What was done is counted before the host can have the reply, and ask for it.
    n_bytes_back = _reply_to(address, slot[tw.REQUEST], n_bytes, slot[tw.REPLY], 0, received)
    if n_bytes_back == 0:
        return False
    block[tw.N_READ] += 1
    announcement = view(slot[tw.LINE], np.int64, 2)
    announcement[0] = n_bytes_back
    announcement[1] = request_id
    if of_semaphore(block[tw.POST], slot[tw.SEMAPHORE]) != 0:
        block[tw.UNSENT] += 1
    ring_bell(slot[tw.LINE] + REPLY_BELL, request_id)
    return True


def _make_turnaround(stamp: int) -> Callable[[int], int]:
    def turnaround(address: int) -> int:
        _ = stamp
        block = view(address, np.int64, tw.BLOCK_WORDS)
        clock, n_slots = block[tw.CLOCK], block[tw.N_SLOTS]
        done = clock_ns(clock)
        for _request in range(block[tw.MOST]):
            block[tw.LOOKED_SINCE] = done
            n_read = block[tw.N_READ]
            line = block[tw.RING] + n_read % n_slots * LINE_BYTES
            seen = look_for(
                line + BELL,
                n_read + 1,
                block[tw.CALL],
                block[tw.LIMIT_NS],
                block[tw.CROWDED_NS],
                clock,
                block[tw.YIELD],
                block[tw.GETRUSAGE],
            )
            if seen != _SEEN_NEWS:
                return seen
            # Of several that wait, Python knows which go together.
            following = block[tw.RING] + (n_read + 1) % n_slots * LINE_BYTES
            if finished(following + BELL) == n_read + 2:
                return _SEEN_NEWS
            received = clock_ns(clock)
            # Who rings has posted before: there is a token, unless the host does not keep to the rules. It comes first,
            # since it orders memory on every architecture.
            if of_semaphore(block[tw.TRY_WAIT], block[tw.REQUEST_SEMAPHORE]) != 0:
                return _SEEN_NEWS
            if not _answer(address, line, received):
                of_semaphore(block[tw.POST], block[tw.REQUEST_SEMAPHORE])
                return _SEEN_NEWS
            block[tw.WAITED_NS] += received - done
            done = clock_ns(clock)
            if finished(block[tw.CALL]) != 0:
                return _SEEN_CALLED
        return _SEEN_CALLED

    return turnaround


def _make_lane_turnaround(stamp: int) -> Callable[[int], int]:
    def lane_turnaround(address: int) -> int:
        _ = stamp
        block = view(address, np.int64, tw.BLOCK_WORDS)
        clock, lane_address = block[tw.CLOCK], block[tw.LANE]
        lane = view(lane_address, np.int64, lw.LANE_WORDS)
        done = clock_ns(clock)
        for _request in range(block[tw.MOST]):
            block[tw.LOOKED_SINCE] = done
            seen = look_for_frame(
                lane_address,
                block[tw.CALL],
                block[tw.LIMIT_NS],
                block[tw.CROWDED_NS],
                clock,
                block[tw.YIELD],
                block[tw.GETRUSAGE],
            )
            if seen != _SEEN_NEWS:
                return seen
            received = clock_ns(clock)
            n_bytes = lane[lw.FRAME]
            if n_bytes == 0:
                return _SEEN_NEWS
            n_bytes_back = _reply_to(address, lane[lw.BUFFER], n_bytes, block[tw.OUT], 0, received)
            if n_bytes_back == 0:
                return _SEEN_NEWS
            let_go(lane_address)
            if send_frame(lane_address, block[tw.OUT], n_bytes_back) != n_bytes_back:
                block[tw.LEFT] = n_bytes_back
                return _SEEN_CALLED
            block[tw.WAITED_NS] += received - done
            done = clock_ns(clock)
            if finished(block[tw.CALL]) != 0:
                return _SEEN_CALLED
        return _SEEN_CALLED

    return lane_turnaround


def _make_answer(stamp: int) -> Callable[[int, int, int, int, int], int]:
    def answer(address: int, request: int, n_bytes: int, reply: int, queue_ns: int) -> int:
        _ = stamp
        block = view(address, np.int64, tw.BLOCK_WORDS)
        return _reply_to(address, request, n_bytes, reply, queue_ns, clock_ns(block[tw.CLOCK]))

    return answer


@functools.cache
def answer_program() -> tuple[Any, Callable[[int, int, int, int, int], int]]:
    """One step: takes the addresses of a block, of a request and its bytes, of the reply, and how long it has waited.

    It returns the bytes of the reply, or 0 if the request is left to Python. Compiled as `turnaround_program` is.
    """
    compiled = compile_entry(_make_answer(source_stamp()), types.int64, 5)
    return compiled, ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(compiled.address)


@functools.cache
def turnaround_program() -> tuple[Any, Callable[[int], int]]:
    """The loop: takes the address of a block, returns a `Seen`. The first call compiles it or loads it from the cache.

    ``CALLED`` also after ``MOST`` requests.
    """
    compiled = compile_entry(_make_turnaround(source_stamp()), types.int64)
    return compiled, ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(compiled.address)


@functools.cache
def lane_turnaround_program() -> tuple[Any, Callable[[int], int]]:
    """As `turnaround_program`, for requests that come over a lane.

    ``CALLED`` also when a reply was ``LEFT``; ``NEWS`` also when the lane has ended.
    """
    compiled = compile_entry(_make_lane_turnaround(source_stamp()), types.int64)
    return compiled, ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(compiled.address)
