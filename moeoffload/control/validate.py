"""Checks what the other side sends over the control plane, before it is stored, logged or used in a computation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from google.protobuf.message import Message

from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.errors import ProtocolError
from moeoffload.text import one_line

MAX_NAME: Final = 128
"""Characters kept of a name (of a host, a device, a version, a kernel)."""
MAX_ITEMS: Final = 16
"""Most timings, channels, transports or parameters in one message."""
MAX_PARAMETER: Final = 1024
_MAX_CALL_S: Final = 3600.0


def clean_texts(message: Message, limit: int = MAX_NAME) -> None:
    """Makes every text of ``message`` (not of nested messages) one printable line of at most ``limit`` characters."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING and not field.is_repeated:
            setattr(message, field.name, one_line(value, limit))


def checked_items(name: str, n: int) -> None:
    """Raises ProtocolError: a message has more than `MAX_ITEMS` of something."""
    if n > MAX_ITEMS:
        raise ProtocolError(f"{n} {name} in one message, allowed are {MAX_ITEMS}")


def checked_timings(timings: Iterable[pb.Timing]) -> list[tuple[int, float]]:
    """Returns (rows, seconds) of a server's timings, on which placement depends.
    Raises ProtocolError: there are too many, or one has no rows or an impossible time."""
    found: list[tuple[int, float]] = []
    for timing in timings:
        checked_items("timings", len(found) + 1)
        if timing.rows < 1 or not math.isfinite(timing.seconds) or not 0 < timing.seconds <= _MAX_CALL_S:
            raise ProtocolError(f"timing of {timing.rows} rows in {timing.seconds!r} s is not possible")
        found.append((timing.rows, timing.seconds))
    return found


def checked_parameters(channel: pb.ChannelOffer) -> dict[str, str]:
    """Returns the parameters of a channel offer. Raises ProtocolError: more or longer ones than any transport has."""
    checked_items("channel parameters", len(channel.parameters))
    for name, value in channel.parameters.items():
        if len(name) > MAX_PARAMETER or len(value) > MAX_PARAMETER:
            raise ProtocolError(f"channel parameter {one_line(name, 32)!r} has {max(len(name), len(value))} characters")
    return dict(channel.parameters)
