"""Both ends of a channel of each transport, in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from moeoffload.transport import ChannelSizes, Deliver, SharedServerEnd, StreamKeys, StreamListener, open_channel

from .ends import SIZES, Ends, echo

TRANSPORTS = ("shared", "stream", "stream encrypted")

OpenEnds = Callable[..., Ends]


@contextlib.contextmanager
def both_ends(transport: str, deliver: Deliver = echo, sizes: ChannelSizes = SIZES) -> Iterator[Ends]:
    """A host's and a server's end that know each other; both are closed at the end."""
    with contextlib.ExitStack() as stack:
        if transport == "shared":
            server = SharedServerEnd(sizes, deliver)
            stack.callback(server.close)
            ends = Ends(open_channel(server.offer, host="", timeout_s=10), server)
        else:
            encrypted, keys = "encrypted" in transport, StreamKeys.new()
            listener = StreamListener(encrypted=encrypted)
            stack.callback(listener.close)
            channel = listener.open_channel(sizes, deliver, keys.public)
            ends = Ends(open_channel(channel.offer, host="127.0.0.1", timeout_s=10, keys=keys), channel)
        stack.callback(ends.server.close)
        stack.callback(ends.host.close)
        yield ends


@pytest.fixture(params=TRANSPORTS)
def open_ends(request: pytest.FixtureRequest) -> Iterator[OpenEnds]:
    """``open_ends(deliver, sizes)`` for each transport in turn."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(both_ends(request.param, *args, **kwargs))
