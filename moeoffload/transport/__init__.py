"""The data plane: channels that move whole frames between a host and an expert server."""

from __future__ import annotations

from moeoffload.errors import ServerError
from moeoffload.transport.base import ChannelOffer, ChannelSizes, Deliver, HostSlot, ServerChannel, ServerSlot
from moeoffload.transport.segment import shared_room, sweep_stale_segments
from moeoffload.transport.shared import SharedServerEnd, open_shared
from moeoffload.transport.slots import HostChannel
from moeoffload.transport.stream import open_stream
from moeoffload.transport.stream_keys import StreamKeys
from moeoffload.transport.stream_server import StreamListener, StreamServerEnd

__all__ = [
    "ChannelOffer",
    "ChannelSizes",
    "Deliver",
    "HostChannel",
    "HostSlot",
    "ServerChannel",
    "ServerSlot",
    "SharedServerEnd",
    "StreamKeys",
    "StreamListener",
    "StreamServerEnd",
    "open_channel",
    "open_shared",
    "open_stream",
    "shared_room",
    "sweep_stale_segments",
]


def open_channel(
    offer: ChannelOffer, *, host: str, timeout_s: float, keys: StreamKeys | None = None, encrypted: bool = False
) -> HostChannel:
    """Opens the host's end of an offered channel; a returned channel is known to work.

    ``host`` is the name or address under which this machine reaches the server, ``keys`` are the CURVE keys of this
    attach, ``encrypted`` refuses a channel without encryption; all three apply to the stream transport only. Takes at
    most ``timeout_s`` seconds.
    Raises DeadlineError: the server did not answer within ``timeout_s``; ServerError: the offer cannot be opened, for
    instance an unknown transport, or shared memory that is not on this host.
    """
    if offer.transport == "shared":
        return open_shared(offer)
    if offer.transport == "stream":
        return open_stream(offer, host, timeout_s=timeout_s, keys=keys, encrypted=encrypted)
    raise ServerError(f"transport {offer.transport!r} is unknown; this host opens shared and stream")
