"""What both sides of the control plane share: its version, channel options and number formats."""

from __future__ import annotations

from typing import Final

import torch

from moeoffload.payload import PayloadDtype

PROTOCOL_VERSION: Final = 1

# A dead peer is noticed within ping interval + timeout, also while the connection is idle.
KEEPALIVE_S: Final = 5
KEEPALIVE_TIMEOUT_S: Final = 5

RETRY_AFTER: Final = "retry-after-ms"
"""Trailing metadata of a refusal that is only for now."""
MOST_RETRY_AFTER_S: Final = 60.0

_LIMITS: Final = [
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CLIENT_OPTIONS: Final = [*_LIMITS, ("grpc.enable_http_proxy", 0)]
SERVER_OPTIONS: Final = [
    *_LIMITS,
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    # Without it two servers could listen on one port and share its connections unnoticed.
    ("grpc.so_reuseport", 0),
]


def dtype_label(dtype: torch.dtype) -> str:
    """f32, f16 or bf16: how a dtype is written in control messages."""
    return PayloadDtype.from_torch(dtype).label


def dtype_of(label: str) -> torch.dtype:
    """The torch dtype of a label.

    Raises:
        KeyError: the label is none of f32, f16, bf16.
    """
    return PayloadDtype[label.upper()].torch_dtype
