"""Sans-I/O frames of the data plane: encode into and decode from buffers that the caller owns."""

from moeoffload.wire.header import (
    HEADER_BYTES,
    ErrorCode,
    Flag,
    FrameHeader,
    Kind,
    is_cancel,
    peek_request_id,
)
from moeoffload.wire.layout import (
    MAX_FRAME_BYTES,
    MAX_SLOTS,
    DispatchViews,
    FrameLayout,
    SlotViews,
    read_error_text,
    write_error_frame,
)
from moeoffload.wire.reader import FrameReader, Role

__all__ = [
    "HEADER_BYTES",
    "MAX_FRAME_BYTES",
    "MAX_SLOTS",
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
