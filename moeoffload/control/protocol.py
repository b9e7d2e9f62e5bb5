"""The protocol version, gRPC channel options and limits that both sides of the control plane share."""

from __future__ import annotations

from typing import Final

PROTOCOL_VERSION: Final = 2

# The largest message is the expert table of a model with many layers of many experts: a few hundred KiB.
MAX_MESSAGE_BYTES: Final = 4 << 20
MAX_CONNECTIONS: Final = 128
"""Further ones are closed at once. At most 32 hosts are attached, with one connection each; the rest is for health
checks."""
MAX_STREAMS: Final = 64
"""Most concurrent calls of one connection."""
MAX_UNREAD: Final = 4
"""Most steps of an attach, or answers to them, that may wait to be read; a host sends one step at a time."""

# A dead peer is noticed within ping interval + timeout, even while the connection is idle.
KEEPALIVE_S: Final = 5
KEEPALIVE_TIMEOUT_S: Final = 5

_LIMITS: Final = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CLIENT_OPTIONS: Final = [
    *_LIMITS,
    ("grpc.enable_http_proxy", 0),
    # Each client has its own connection: one that hangs must not block the next attempt to reach the server.
    ("grpc.use_local_subchannel_pool", 1),
]
SERVER_OPTIONS: Final = [
    *_LIMITS,
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    # Otherwise two servers could listen on one port and share its connections unnoticed.
    ("grpc.so_reuseport", 0),
    # A peer that does not finish its handshake, or makes no more calls, must not hold a file descriptor forever.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
]
