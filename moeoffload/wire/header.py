"""The fixed 64-byte little-endian header in front of every frame of the data plane.

Layout (offset, size, field)::

    0  4  magic "MOEX"         24  4  rows                    48  4  queue_us    (replies) waiting time on the server
    4  1  version              28  4  flags                   52  4  compute_us  (replies) compute time on the server
    5  1  kind                 32  8  body_bytes              56  4  code        (error frames) wire.ErrorCode
    6  1  dtype_out            40  8  timeout_us              60  4  checksum    CRC-32 of bytes 0..59
    7  1  dtype_back
    8  8  request_id           ``timeout_us`` is how long the sender waits from now on, since clocks of two machines
    16 4  epoch                differ; 0 means no limit.
    20 2  layer
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
_REQUEST_ID: Final = struct.Struct("<Q")
_REQUEST_ID_OFFSET: Final = 8
_BODY_BYTES: Final = struct.Struct("<Q")
_BODY_BYTES_OFFSET: Final = 32
_LAYER: Final = struct.Struct("<H")
_LAYER_OFFSET: Final = 20
assert _FIELDS.size + _CHECKSUM.size == HEADER_BYTES


class Kind(IntEnum):
    """What a frame is."""

    DISPATCH = 1
    COMBINE = 2
    ERROR = 3
    CANCEL = 4
    PING = 5


class Flag(IntFlag):
    """Bits of the header's ``flags``."""

    NONE = 0
    WEIGHTS_F32 = 1
    """The model's routing weights are float32; without it they are of the compute dtype (and travel as float32)."""


class ErrorCode(IntEnum):
    """Why a server answered with an error frame."""

    BAD_FRAME = 1
    CAPACITY = 2
    BAD_SLOT = 3
    PAYLOAD = 4
    BUSY = 5
    DRAINING = 6
    TOO_LATE = 7
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

    def first_word(self) -> int:
        """The first eight bytes as a little-endian integer: magic, version, kind and dtypes."""
        frame = bytearray(HEADER_BYTES)
        self.pack_into(memoryview(frame))
        return int.from_bytes(frame[:8], "little")

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

        Raises:
            ProtocolError: naming the field, if the bytes are too few, of another protocol or damaged.
        """
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


def is_ping(frame: memoryview) -> bool:
    """Whether the frame in ``frame`` (at least 64 bytes) has a valid header, of a ping."""
    header = FrameHeader()
    try:
        header.unpack_from(frame)
    except ProtocolError:
        return False
    return header.kind == Kind.PING


def peek_frame_bytes(frame: memoryview) -> int:
    """Bytes of the whole frame as its header has them, without checking anything."""
    return HEADER_BYTES + int(_BODY_BYTES.unpack_from(frame, _BODY_BYTES_OFFSET)[0])


def peek_request_id(buffer: memoryview) -> int:
    """The request id of the frame in ``buffer`` (at least 64 bytes), without looking at anything else."""
    return int(_REQUEST_ID.unpack_from(buffer, _REQUEST_ID_OFFSET)[0])


def peek_layer(buffer: memoryview) -> int:
    """The MoE layer of the frame in ``buffer`` (at least 64 bytes), without looking at anything else."""
    return int(_LAYER.unpack_from(buffer, _LAYER_OFFSET)[0])
