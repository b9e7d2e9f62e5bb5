"""The stream transport against peers, networks and bytes that are not as they should be."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import zmq
from fault_kit.proxy import Proxy, proxy_of

from moeoffload.errors import DeadlineError, ProtocolError, ServerError, SettingError
from moeoffload.transport import (
    ChannelSizes,
    Deliver,
    HostChannel,
    StreamKeys,
    StreamListener,
    StreamServerEnd,
    open_channel,
    open_stream,
)
from moeoffload.transport.stream_keys import encrypt_host_end
from moeoffload.transport.zmq_socket import PIECE_BYTES, TAG
from moeoffload.wire import HEADER_BYTES, ErrorCode, FrameHeader, Kind

from .conftest import both_ends
from .ends import SIZES, SOON_S, OnDemand, bare_dealer, begin, call, echo, eventually, receive, send


@pytest.fixture
def listener() -> Iterator[StreamListener]:
    listener = StreamListener()
    yield listener
    listener.close()


def opened(listener: StreamListener, deliver: Deliver = echo, sizes: ChannelSizes = SIZES) -> StreamServerEnd:
    return listener.open_channel(sizes, deliver)


def connected(channel: StreamServerEnd, host: str = "127.0.0.1") -> HostChannel:
    return open_channel(channel.offer, host=host, timeout_s=SOON_S)


def frame(request_id: int, body: bytes = b"", kind: Kind = Kind.DISPATCH) -> bytes:
    data = bytearray(HEADER_BYTES)
    FrameHeader(kind, request_id=request_id, body_bytes=len(body)).pack_into(memoryview(data))
    return bytes(data) + body


def message(request_id: int, body: bytes = b"", kind: Kind = Kind.DISPATCH) -> list[bytes]:
    data = frame(request_id, body, kind)
    return [TAG.pack(request_id, 0, len(data)), data]


def outgoing(request_id: int) -> tuple[memoryview, int]:
    return memoryview(frame(request_id)), HEADER_BYTES


def reply_to(dealer: zmq.Socket[bytes]) -> tuple[int, FrameHeader]:
    tag, data = dealer.recv_multipart()
    header = FrameHeader()
    header.unpack_from(memoryview(data))
    return TAG.unpack(tag)[0], header


def error_of(listener: StreamListener, channel: StreamServerEnd, *parts: bytes) -> int:
    """The code of the error frame that answers this message to request 5."""
    with bare_dealer(listener.port, channel.routing_id) as dealer:
        dealer.send_multipart(parts)
        tag, header = reply_to(dealer)
        assert (tag, header.request_id, header.kind) == (5, 5, Kind.ERROR)
        return header.code


def still_works(listener: StreamListener) -> bool:
    """A new host at this listener, which encrypts nothing, gets an answer."""
    channel = opened(listener)
    host = connected(channel)
    answer = call(host, b"still works")
    host.close()
    channel.close()
    return answer == b"still works"


def test_who_has_no_channel_is_dropped_and_counted(listener: StreamListener) -> None:
    channel = opened(listener, OnDemand())
    for stranger in (b"stranger", b"m" * 32, b"m" * 200, channel.routing_id[:-1]):
        before = listener.n_unknown
        with bare_dealer(listener.port, stranger) as dealer:
            dealer.send_multipart(message(4))
            dealer.send_multipart([b"a", b"b", b"c" * 1000, b""])
            eventually(lambda before=before: listener.n_unknown == before + 2)  # type: ignore[misc]
    assert channel.n_dropped == 0
    assert still_works(listener)


def test_wrong_messages_are_answered_with_the_reason(listener: StreamListener) -> None:
    channel = opened(listener)
    assert error_of(listener, channel, *message(5, b"x" * SIZES.request_bytes)) == ErrorCode.CAPACITY
    assert error_of(listener, channel, TAG.pack(5, 0, 2**32 - 1), frame(5)) == ErrorCode.CAPACITY
    for announced, data in ((5, b"short"), (0, b""), (64, b""), (64, frame(5)[:-1]), (64, frame(9)), (65, frame(5))):
        assert error_of(listener, channel, TAG.pack(5, 0, announced), data) == ErrorCode.BAD_FRAME
    assert channel.n_dropped == 8
    assert still_works(listener)


def test_messages_without_an_id_are_dropped_and_counted(listener: StreamListener) -> None:
    channel = opened(listener)
    with bare_dealer(listener.port, channel.routing_id) as dealer:
        for parts in ([b""], [TAG.pack(5, 0, 64)], [b"1234567", frame(5)], [bytes(17), frame(5)], message(0)):
            dealer.send_multipart(parts)
        dealer.send_multipart([*message(7), b"one part too many"])
        assert reply_to(dealer)[0] == 7
    assert channel.n_dropped == 5


def test_a_host_with_more_in_flight_than_slots_is_told_busy(listener: StreamListener) -> None:
    engine = OnDemand()
    channel = opened(listener, engine)
    with bare_dealer(listener.port, channel.routing_id) as dealer:
        dealer.send_multipart(message(4, b"kept"))
        taken = engine.take()
        dealer.send_multipart(message(8, b"refused" * 100))
        tag, header = reply_to(dealer)
        assert (tag, header.request_id, header.kind, header.code) == (8, 8, Kind.ERROR, ErrorCode.BUSY)
        dealer.send_multipart(message(4, kind=Kind.CANCEL))
        dealer.send_multipart(message(12))
        assert reply_to(dealer)[0] == 12, "a cancellation of a request that is being worked on is not sent back"
        echo(*taken)
        assert dealer.recv_multipart() == message(4, b"kept")
        dealer.send_multipart(message(8))
        engine.answer()
        assert reply_to(dealer)[0] == 8


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_message_beyond_the_limit_never_gets_in(encrypted: bool) -> None:
    keys = StreamKeys.new()
    with contextlib.closing(StreamListener(encrypted=encrypted)) as listener:
        channel, server_key = listener.open_channel(SIZES, echo, keys.public), listener.public_key.encode()

        def prepare(dealer: zmq.Socket[bytes]) -> None:
            if encrypted:
                encrypt_host_end(dealer, keys, server_key)

        with bare_dealer(listener.port, channel.routing_id, prepare) as dealer:
            dealer.send_multipart(message(8))
            assert dealer.recv_multipart() == message(8)
            dealer.setsockopt(zmq.RCVTIMEO, 300)
            dealer.send_multipart([TAG.pack(4, 0, 2**30), bytes(PIECE_BYTES + 1)])
            with pytest.raises(zmq.Again):
                dealer.recv()
        assert channel.n_dropped == 0
        assert encrypted or still_works(listener)


def test_pieces_out_of_order_are_dropped_and_the_frame_can_start_again(listener: StreamListener) -> None:
    channel = opened(listener, echo, ChannelSizes(2, 2 * PIECE_BYTES, 2 * PIECE_BYTES))
    data = frame(4, os.urandom(PIECE_BYTES))
    first, rest = data[:PIECE_BYTES], data[PIECE_BYTES:]
    with bare_dealer(listener.port, channel.routing_id) as dealer:
        for request_id, at, n_bytes, piece in (
            (4, PIECE_BYTES, len(data), rest),
            (4, 0, len(data), first),
            (4, 100, len(data), rest),
            (2, PIECE_BYTES, len(data), rest),
            (4, PIECE_BYTES, len(data) + 1, rest),
            (4, 2**32 - 1, len(data), rest),
        ):
            dealer.send_multipart([TAG.pack(request_id, at, n_bytes), piece])
        dealer.send_multipart([TAG.pack(4, 0, len(data)), first])
        dealer.send_multipart([TAG.pack(4, PIECE_BYTES, len(data)), rest])
        pieces = [dealer.recv_multipart() for _ in range(2)]
        assert pieces == [[TAG.pack(4, 0, len(data)), first], [TAG.pack(4, PIECE_BYTES, len(data)), rest]]
        assert channel.n_dropped == 5
        dealer.send_multipart([TAG.pack(4, 0, len(data)), first])
        dealer.send_multipart([TAG.pack(4, PIECE_BYTES, len(data)), rest + b"too long"])
        assert reply_to(dealer)[1].code == ErrorCode.BAD_FRAME


@pytest.mark.parametrize(("announced", "data"), [(0, b""), (63, bytes(63)), (64, b""), (2**32 - 1, bytes(64))])
def test_a_reply_of_an_impossible_length_is_an_error(listener: StreamListener, announced: int, data: bytes) -> None:
    engine = OnDemand()
    channel = opened(listener, engine)
    host = connected(channel)
    slot, request_id = begin(host)
    engine.take()
    with listener._using:
        listener._wire.socket.send_multipart([channel.routing_id, TAG.pack(request_id, 0, announced), data])
    with pytest.raises(ProtocolError, match="bytes; a slot takes"):
        host.wait(slot, SOON_S)
    host.release(slot)
    host.close()


def test_replies_to_a_host_that_is_gone_are_dropped_and_counted(listener: StreamListener) -> None:
    engine = OnDemand()
    channel = opened(listener, engine)
    host = connected(channel)
    for _ in range(4):
        begin(host)
    taken = [engine.take() for _ in range(4)]
    host.close()

    def dropped() -> bool:
        if taken:
            echo(*taken.pop())
        return channel.n_dropped > 0

    eventually(dropped)
    assert still_works(listener)


def test_replies_that_nobody_asked_for_are_dropped_and_counted(listener: StreamListener) -> None:
    with both_ends("stream") as ends:
        server = ends.server
        assert isinstance(server, StreamServerEnd)
        for tag in (1, 5, 9, 2**64 - 1):  # 4 was the greeting's
            server._listener.send(server, tag, *outgoing(tag))
        assert call(ends.host, b"mine") == b"mine"
        assert ends.host.n_stale == 4


def test_a_listener_that_restarts_knows_no_old_channels() -> None:
    old = StreamListener()
    host = connected(opened(old))
    slot = host.acquire(SOON_S)
    old.close()
    new = StreamListener(port=old.port)
    send(host, slot)
    with pytest.raises(ServerError, match="closed"):
        host.wait(slot, SOON_S)
    host.close()
    assert still_works(new)
    new.close()
    new.close()
    with pytest.raises(ServerError, match="closed"):
        opened(new)


def test_what_cannot_be_opened_is_named(listener: StreamListener) -> None:
    with pytest.raises(SettingError, match=f"cannot listen at 127.0.0.1, port {listener.port}: Address already"):
        StreamListener(port=listener.port)
    offer = opened(listener).offer
    listener.close()
    with pytest.raises(DeadlineError, match="no answer"):
        open_channel(offer, host="127.0.0.1", timeout_s=0.1)


@pytest.mark.parametrize(
    "wrong", [{"port": "x"}, {"port": "0"}, {"port": "70000"}, {"routing_id": "zz"}, {"routing_id": "6d"}]
)
def test_offers_and_addresses_that_make_no_sense_are_named(listener: StreamListener, wrong: dict[str, str]) -> None:
    offer = opened(listener).offer
    with pytest.raises(ServerError, match="the offer of a stream channel has"):
        open_stream(replace(offer, parameters=offer.parameters | wrong), "127.0.0.1", timeout_s=1)
    with pytest.raises(ServerError, match="not an address"):
        open_stream(offer, "no such host/", timeout_s=1)


@pytest.fixture
def proxy(listener: StreamListener) -> Iterator[Proxy]:
    with proxy_of(listener.port) as proxy:
        yield proxy


def test_a_slot_whose_reply_was_lost_with_the_connection_comes_back(listener: StreamListener, proxy: Proxy) -> None:
    engine = OnDemand()
    channel = opened(listener, engine, ChannelSizes(1, 128, 128))
    host = connected(channel, proxy.here)
    slot, _ = begin(host)
    taken_channel, taken = engine.take()
    proxy.tell("cut")
    eventually(lambda: not listener.send(channel, 99, *outgoing(99)))
    before = channel.n_dropped
    echo(taken_channel, taken)
    assert channel.n_dropped == before + 1
    with pytest.raises(DeadlineError):
        host.wait(slot, 0.01)
    host.release(slot)
    proxy.tell("mend")
    assert host.acquire(SOON_S) is slot
    assert host.n_stale >= 1
    host.release(slot)
    with_answers = threading.Thread(target=engine.answer)
    with_answers.start()
    assert call(host, b"again") == b"again"
    with_answers.join()
    host.close()


def test_what_is_sent_while_disconnected_arrives_later(listener: StreamListener, proxy: Proxy) -> None:
    channel = opened(listener)
    host = connected(channel, proxy.here)
    proxy.tell("cut")
    eventually(lambda: not listener.send(channel, 99, *outgoing(99)))
    slot, request_id = begin(host, b"patience")
    with pytest.raises(DeadlineError):
        host.wait(slot, 0.02)
    host.release(slot)
    other, request_id = begin(host, b"patience")
    proxy.tell("mend")
    assert receive(host, other, request_id) == b"patience"
    host.release(other)
    eventually(lambda: not host._collect_late() and host.is_idle)  # type: ignore[func-returns-value]
    host.close()


def test_a_send_that_nobody_takes_ends(listener: StreamListener, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = opened(listener)
    host = connected(channel)
    monkeypatch.setattr("moeoffload.transport.stream.SEND_TIMEOUT_S", 0.01)
    monkeypatch.setattr("moeoffload.transport.zmq_socket.FrameSocket.send", lambda *args: 0)
    slot = host.acquire(SOON_S)
    with pytest.raises(ServerError, match="has taken nothing"):
        send(host, slot)
    monkeypatch.undo()
    host.release(slot)
    assert call(host, b"and on") == b"and on"
    host.close()


def test_ctrl_c_at_the_end_of_a_send_gives_no_request_the_reply_of_another(
    listener: StreamListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    host: Any = connected(opened(listener, sizes=replace(SIZES, n_slots=1)))
    sends = host._wire.send

    def interrupted(*args: Any) -> int:
        sends(*args)
        raise KeyboardInterrupt

    slot = host.acquire(SOON_S)
    monkeypatch.setattr(host._wire, "send", interrupted)  # not the server's, which may answer at once
    with pytest.raises(KeyboardInterrupt):
        send(host, slot, b"first")
    monkeypatch.undo()
    host.release(slot)
    assert call(host, b"other") == b"other"
    host.close()


def test_a_host_that_is_forgotten_frees_itself(listener: StreamListener) -> None:
    channels = []
    for _ in range(2):
        host = connected(opened(listener))
        assert call(host, b"x") == b"x"
        host.slots[0].owner = host  # a cycle, so that the order of freeing is anybody's guess
        channels.append(weakref.ref(host))
    del host
    gc.collect()
    assert [channel() for channel in channels] == [None, None]
