"""Sans-I/O frames of the data plane: encode into and decode from buffers that the caller owns."""

from moeoffload.wire.header import (
    HEADER_BYTES,
    WIRE_VERSION,
    ErrorCode,
    Flag,
    FrameHeader,
    FrameReader,
    Kind,
    Role,
    is_cancel,
    peek_request_id,
)
from moeoffload.wire.layout import (
    MAX_FRAME_BYTES,
    MAX_ROWS,
    MAX_SLOTS,
    DispatchViews,
    FrameLayout,
    SlotViews,
    read_error_text,
    write_error_frame,
)

__all__ = [
    "HEADER_BYTES",
    "MAX_FRAME_BYTES",
    "MAX_ROWS",
    "MAX_SLOTS",
    "WIRE_VERSION",
    "DispatchViews",
    "ErrorCode",
    "Flag",
    "FrameHeader",
    "FrameLayout",
    "FrameReader",
    "Kind",
    "Role",
    "SlotViews",
    "is_cancel",
    "peek_request_id",
    "read_error_text",
    "write_error_frame",
]
