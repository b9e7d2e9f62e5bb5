"""The 64-byte little-endian header in front of every frame.

Layout (offset, size, field)::

    0  4  magic "MOEX"         24  4  rows                    48  4  queue_us    (replies) waiting time on the server
    4  1  version              28  4  flags                   52  4  compute_us  (replies) compute time on the server
    5  1  kind                 32  8  body_bytes              56  4  code        (error frames) wire.ErrorCode
    6  1  dtype_out            40  8  timeout_us              60  4  checksum    CRC-32 of bytes 0..59
    7  1  dtype_back
    8  8  request_id           ``timeout_us`` is relative to the time of sending, since clocks of two machines differ;
    16 4  epoch                0 means no limit. The server does not compute a request that has waited longer, nor one
    20 2  layer                for which a CANCEL frame with its request id arrived before computation began.
    22 2  top_k
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final

from moeoffload.errors import ProtocolError

MAGIC: Final = b"MOEX"
WIRE_VERSION: Final = 1
HEADER_BYTES: Final = 64

_FIELDS: Final = struct.Struct("<4sBBBBQIHHIIQQIII")
_CHECKSUM: Final = struct.Struct("<I")
_REQUEST_ID: Final = struct.Struct("<8xQ")
assert _FIELDS.size + _CHECKSUM.size == HEADER_BYTES


class Kind(IntEnum):
    """Kinds of frames."""

    DISPATCH = 1
    COMBINE = 2
    ERROR = 3
    CANCEL = 4
    """The host no longer waits for the reply to this request. A server that does not have the request (any more) sends
    the frame back: the host's slot is free or, for a request that was never sent, the channel works."""


class Flag(IntFlag):
    """Bits of the header's ``flags``."""

    NONE = 0
    WEIGHTS_F32 = 1
    """The model's routing weights are float32; without the flag they have the compute dtype (but travel as float32)."""


class ErrorCode(IntEnum):
    """Why a server answered with an error frame."""

    BAD_FRAME = 1
    CAPACITY = 2
    BAD_SLOT = 3
    PAYLOAD = 4
    BUSY = 5
    DRAINING = 6
    TOO_LATE = 7
    """The host had stopped waiting before computation began; the request was not computed."""
    INTERNAL = 8


@dataclass(slots=True)
class FrameHeader:
    """One header; made once per slot and refilled.

    ``rows`` counts hidden rows (in an error frame with code PAYLOAD: the row at fault), ``layer`` is the running number
    of the MoE layer, ``epoch`` the attach the frame belongs to, times are in microseconds.
    """

    kind: int = Kind.DISPATCH
    dtype_out: int = 0
    dtype_back: int = 0
    request_id: int = 0
    epoch: int = 0
    layer: int = 0
    top_k: int = 0
    rows: int = 0
    flags: int = 0
    body_bytes: int = 0
    timeout_us: int = 0
    queue_us: int = 0
    compute_us: int = 0
    code: int = 0

    def pack_into(self, buffer: memoryview) -> None:
        """Writes the header with its checksum over the first 64 bytes of ``buffer``."""
        _FIELDS.pack_into(
            buffer, 0, MAGIC, WIRE_VERSION, self.kind, self.dtype_out, self.dtype_back, self.request_id, self.epoch,
            self.layer, self.top_k, self.rows, self.flags, self.body_bytes, self.timeout_us, self.queue_us,
            self.compute_us, self.code,
        )  # fmt: skip
        _CHECKSUM.pack_into(buffer, _FIELDS.size, zlib.crc32(buffer[: _FIELDS.size]))

    def unpack_from(self, buffer: memoryview) -> None:
        """Reads a header from the first 64 bytes of ``buffer`` into this object.
        Raises ProtocolError: the bytes are too few, of another protocol or damaged; the message names the field."""
        if len(buffer) < HEADER_BYTES:
            raise ProtocolError(f"frame of {len(buffer)} bytes is shorter than its {HEADER_BYTES}-byte header")
        (
            magic, version, self.kind, self.dtype_out, self.dtype_back, self.request_id, self.epoch, self.layer,
            self.top_k, self.rows, self.flags, self.body_bytes, self.timeout_us, self.queue_us, self.compute_us,
            self.code,
        ) = _FIELDS.unpack_from(buffer)  # fmt: skip
        if magic != MAGIC:
            raise ProtocolError(f"frame magic is {magic!r}, expected {MAGIC!r}")
        if version != WIRE_VERSION:
            raise ProtocolError(f"frame version is {version}, this side speaks {WIRE_VERSION}")
        if _CHECKSUM.unpack_from(buffer, _FIELDS.size)[0] != zlib.crc32(buffer[: _FIELDS.size]):
            raise ProtocolError("frame checksum does not match its header")


def is_cancel(frame: memoryview) -> bool:
    """Returns whether ``frame`` (at least 64 bytes) begins with a valid header of a cancellation."""
    header = FrameHeader()
    try:
        header.unpack_from(frame)
    except ProtocolError:
        return False
    return header.kind == Kind.CANCEL


def peek_request_id(buffer: memoryview) -> int:
    """Returns the request id of the frame in ``buffer`` (at least 64 bytes) without checking anything."""
    return int(_REQUEST_ID.unpack_from(buffer)[0])
