"""Runs inside an expert server process: spoils the next replies as told through a pipe; all else is the real server."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

from moeoffload.transport.base import ServerChannel, ServerSlot
from moeoffload.wire import HEADER_BYTES, ErrorCode, FrameHeader, peek_request_id, write_error_frame

LATE_S: Final = 3.0
SLOW_S: Final = 0.02

Reply = Callable[[ServerChannel, ServerSlot, int], None]
_send: Final[Reply] = ServerChannel.reply


def _half(channel: ServerChannel, slot: ServerSlot, n_bytes: int) -> None:
    """The header promises a whole frame, half of it is announced."""
    _send(channel, slot, max(HEADER_BYTES, n_bytes // 2))


def _die(channel: ServerChannel, slot: ServerSlot, n_bytes: int) -> None:
    """The process is gone when half of the reply is in the slot."""
    middle = HEADER_BYTES + (n_bytes - HEADER_BYTES) // 2
    slot.reply[middle:n_bytes] = b"\xff" * (n_bytes - middle)
    os.kill(os.getpid(), signal.SIGKILL)


def _damaged(channel: ServerChannel, slot: ServerSlot, n_bytes: int) -> None:
    """A bit of the header is wrong."""
    slot.reply[24] ^= 0x10
    _send(channel, slot, n_bytes)


def _unwritten(channel: ServerChannel, slot: ServerSlot, n_bytes: int) -> None:
    """A reply is announced where none was written."""
    slot.reply[:HEADER_BYTES] = bytes(HEADER_BYTES)
    _send(channel, slot, n_bytes)


def _rewritten(change: Callable[[FrameHeader], dict[str, int]]) -> Reply:
    """A valid frame whose header has other values."""

    def reply(channel: ServerChannel, slot: ServerSlot, n_bytes: int) -> None:
        header = FrameHeader()
        header.unpack_from(slot.reply)
        for name, value in change(header).items():
            setattr(header, name, value)
        header.pack_into(slot.reply)
        _send(channel, slot, n_bytes)

    return reply


def _twice(channel: ServerChannel, slot: ServerSlot, n_bytes: int) -> None:
    """The same reply is sent a second time."""
    _send(channel, slot, n_bytes)
    with channel._lock:
        if not channel._closed and not channel._busy[slot.index]:
            channel._send_reply(slot, n_bytes)


def _late(channel: ServerChannel, slot: ServerSlot, n_bytes: int) -> None:
    """The reply comes when nobody waits for it any more."""
    timer = threading.Timer(LATE_S, _send, (channel, slot, n_bytes))
    timer.daemon = True
    timer.start()


def _never(channel: ServerChannel, slot: ServerSlot, n_bytes: int) -> None:
    """There is no reply."""


def _slowly(channel: ServerChannel, slot: ServerSlot, n_bytes: int) -> None:
    time.sleep(SLOW_S)
    _send(channel, slot, n_bytes)


def _failed(channel: ServerChannel, slot: ServerSlot, n_bytes: int) -> None:
    """The server says that it failed."""
    request_id = peek_request_id(slot.reply)
    text = "a failure on purpose"
    _send(channel, slot, write_error_frame(FrameHeader(), slot.reply, request_id, ErrorCode.INTERNAL, text))


SPOILERS: Final[dict[str, Reply]] = {
    "half": _half, "die": _die, "damaged": _damaged, "unwritten": _unwritten, "twice": _twice, "late": _late,
    "never": _never, "slowly": _slowly, "failed": _failed,
    "older": _rewritten(lambda header: {"request_id": max(1, header.request_id - 64)}),
    "other epoch": _rewritten(lambda header: {"epoch": header.epoch + 1}),
}  # fmt: skip


def spoil_replies(orders: Connection) -> None:
    """From now on each order ``(name, n)`` of the pipe spoils the next ``n`` replies of this process."""
    ordered: deque[Reply] = deque()

    def reply(channel: ServerChannel, slot: ServerSlot, n_bytes: int) -> None:
        try:
            spoiler = ordered.popleft()
        except IndexError:
            spoiler = _send
        spoiler(channel, slot, n_bytes)

    def listen() -> None:
        with contextlib.suppress(EOFError):
            while True:
                name, n = orders.recv()
                ordered.extend([SPOILERS[name]] * n)
                orders.send(name)

    ServerChannel.reply = reply  # type: ignore[method-assign, assignment]
    threading.Thread(target=listen, name="bad-replies", daemon=True).start()
