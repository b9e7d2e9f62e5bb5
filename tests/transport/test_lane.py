"""Lanes: small frames go over them, and whatever happens to them the channel works as it did without one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zmq.utils import z85

from moeoffload.errors import DeadlineError, ServerError
from moeoffload.kernels.lane_program import BOX_BYTES
from moeoffload.transport import (
    ChannelSizes,
    Deliver,
    ServerChannel,
    ServerSlot,
    StreamKeys,
    StreamListener,
    StreamServerEnd,
    lane_door,
    lane_key,
    open_stream,
)
from moeoffload.transport.lane import LANE_BYTES, TOKEN_BYTES, Lane
from moeoffload.transport.lane_key import LaneKey
from moeoffload.transport.lane_reader import LaneReader
from moeoffload.transport.stream import StreamHostEnd
from moeoffload.transport.zmq_socket import TAG
from moeoffload.wire import HEADER_BYTES, FrameHeader, Kind

from .ends import SIZES, SOON_S, OnDemand, call, echo, eventually, receive, send
from .tcp import Proxy, bare_dealer

LARGE = ChannelSizes(2, 4 * LANE_BYTES, 4 * LANE_BYTES)


@pytest.fixture(params=["plain", "sealed"])
def listener(request: pytest.FixtureRequest) -> Iterator[StreamListener]:
    sealed = request.param == "sealed"
    listener = StreamListener(max_request_bytes=LARGE.request_bytes, lane_port=0, encrypted=sealed)
    yield listener
    listener.close()


only_plain = pytest.mark.parametrize("listener", ["plain"], indirect=True)
only_sealed = pytest.mark.parametrize("listener", ["sealed"], indirect=True)


@contextlib.contextmanager
def both(
    listener: StreamListener, deliver: Deliver = echo, sizes: ChannelSizes = SIZES, other: dict[str, str] | None = None
) -> Iterator[tuple[StreamHostEnd, StreamServerEnd]]:
    keys = StreamKeys.new()
    server = listener.open_channel(sizes, deliver, keys.public)
    server.offer.parameters.update(other or {})
    host = open_stream(server.offer, "127.0.0.1", timeout_s=SOON_S, keys=keys)
    try:
        yield host, server
    finally:
        host.close()
        server.close()


def port_of(listener: StreamListener) -> int:
    assert listener.lane_door is not None
    return listener.lane_door.port


def reader_of(server: StreamServerEnd) -> LaneReader:
    assert server._lane is not None
    return server._lane


@contextlib.contextmanager
def bare_lane(listener: StreamListener, server: StreamServerEnd) -> Iterator[socket.socket]:
    """The host's end of a lane, as anybody could write it."""
    with socket.create_connection(("127.0.0.1", port_of(listener)), SOON_S) as connection:
        connection.sendall(bytes.fromhex(server.offer.parameters["lane_token"]))
        eventually(lambda: server._lane is not None)
        yield connection


class Wire:
    """A lane between two sockets; the bytes that went over it, and a hand that can change them."""

    def __init__(self, listener: StreamListener) -> None:
        self.seen: list[bytes] = []
        self.change: Callable[[bytes], bytes] = lambda data: data
        self._port = port_of(listener)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._listener, self._listener.accept()[0] as near:
            self.near = near
            self.far = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._pass, args=(self.far, near), daemon=True).start()
            self._pass(near, self.far)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                self.seen.append(data)
                sink.sendall(self.change(data))
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


def frame(request_id: int, body: bytes = b"", kind: Kind = Kind.DISPATCH) -> bytes:
    data = bytearray(HEADER_BYTES)
    FrameHeader(kind, request_id=request_id, body_bytes=len(body)).pack_into(memoryview(data))
    return bytes(data) + body


def read(connection: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        data += (piece := connection.recv(n_bytes - len(data)))
        assert piece, "the lane was closed"
    return data


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_small_frames_need_nothing_but_the_lane(listener: StreamListener) -> None:
    proxy = Proxy(listener.port)
    with both(listener, sizes=LARGE, other={"port": str(proxy.port)}) as (host, _):
        proxy.cut()
        for body in (b"", b"small", os.urandom(LANE_BYTES - HEADER_BYTES)):
            assert call(host, body) == body
        large = os.urandom(LANE_BYTES)
        with pytest.raises(DeadlineError):
            call(host, large, 0.3)
        proxy.mend()
        assert call(host, large) == large
        assert host.remark == ""
    proxy.close()


def test_one_request_is_on_the_lane_and_the_others_go_another_way(listener: StreamListener) -> None:
    server = OnDemand()
    with both(listener, server) as (host, _):
        slots = [host.acquire(SOON_S) for _ in range(3)]
        ids = [send(host, slot, bytes([slot.index])) for slot in slots]
        for _ in slots:
            server.answer()
        for slot, request_id in zip(reversed(slots), reversed(ids), strict=True):
            assert receive(host, slot, request_id) == bytes([slot.index])
            host.release(slot)
        assert host.is_idle
        assert host.n_stale == 0


def test_a_reply_that_the_lane_cannot_bring_comes_another_way(listener: StreamListener) -> None:
    server = OnDemand()
    proxy = Proxy(port_of(listener))
    with both(listener, server, other={"lane_port": str(proxy.port)}) as (host, end):
        slot = host.acquire(SOON_S)
        request_id = send(host, slot, b"asked over the lane")
        request = server.take()
        proxy.cut()
        eventually(lambda: reader_of(end)._closed)
        echo(*request)
        assert receive(host, slot, request_id) == b"asked over the lane"
        assert "lane" in host.remark
        second = send(host, slot, b"and the next")
        server.answer()
        assert receive(host, slot, second) == b"and the next"
        host.release(slot)
    proxy.close()


def test_a_request_that_the_lane_cannot_bring_goes_another_way(listener: StreamListener) -> None:
    with both(listener) as (host, _):
        assert call(host, b"first") == b"first"
        assert host._lane is not None
        host._lane.end()
        assert call(host, b"second") == b"second"
        assert call(host, b"third") == b"third"


def test_a_request_that_was_lost_with_the_lane_is_sent_again(listener: StreamListener) -> None:
    wire = Wire(listener)
    with both(listener, other={"lane_port": str(wire.port)}) as (host, _):
        assert call(host, b"before") == b"before"

        def lose(data: bytes) -> bytes:
            wire.far.shutdown(socket.SHUT_RDWR)
            return data

        wire.change = lose
        assert call(host, b"lost") == b"lost"
        assert call(host, b"after") == b"after"
        assert host.n_stale == 0


def test_a_reply_that_was_lost_with_the_lane_is_made_again(listener: StreamListener) -> None:
    wire = Wire(listener)
    with both(listener, other={"lane_port": str(wire.port)}) as (host, _):
        assert call(host, b"before") == b"before"
        answers: list[bytes] = []

        def lose(data: bytes) -> bytes:
            answers.append(data)
            if len(answers) == 1:  # the request
                return data
            wire.near.shutdown(socket.SHUT_RDWR)
            return data

        wire.change = lose
        assert call(host, b"lost") == b"lost"
        assert len(answers) == 2


def test_a_late_reply_frees_its_slot_and_the_lane(listener: StreamListener) -> None:
    server = OnDemand()
    with both(listener, server, ChannelSizes(1, 8192, 8192)) as (host, _):
        slot = host.acquire(SOON_S)
        send(host, slot, b"late")
        with pytest.raises(DeadlineError):
            host.wait(slot, 0.05)
        host.release(slot)
        server.answer()
        slot = host.acquire(SOON_S)
        request_id = send(host, slot, b"in time")
        server.answer()
        assert receive(host, slot, request_id) == b"in time"
        host.release(slot)
        assert host.n_stale == 1
        assert host._lane is not None


def test_a_wait_that_is_kept_can_be_taken_up_again(listener: StreamListener) -> None:
    server = OnDemand()
    with both(listener, server) as (host, _):
        slot = host.acquire(SOON_S)
        request_id = send(host, slot, b"patience")
        with pytest.raises(DeadlineError):
            host.wait(slot, 0.05, keep=True)
        server.answer()
        assert receive(host, slot, request_id) == b"patience"
        host.release(slot)


def test_a_slot_whose_reply_was_lost_on_the_lane_comes_back(
    listener: StreamListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with both(listener, sizes=ChannelSizes(1, 8192, 8192)) as (host, _):
        slot = host.acquire(SOON_S)
        monkeypatch.setattr(LaneReader, "send", lambda self, data: True)
        send(host, slot, b"lost")
        with pytest.raises(DeadlineError):
            host.wait(slot, 0.05)
        host.release(slot)
        monkeypatch.undo()
        assert call(host, b"after") == b"after"


def test_a_reply_that_comes_twice_is_nobody_elses(listener: StreamListener, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(self: LaneReader, data: memoryview) -> bool:
        return self.lane.send(data) and self.lane.send(data)

    with both(listener) as (host, _):
        assert call(host, b"first") == b"first"
        monkeypatch.setattr(LaneReader, "send", twice)
        for body in (b"second", b"third", b"fourth"):
            assert call(host, body) == body


@pytest.mark.parametrize("where", ["_expect_otherwise", "_mark_sent", "_enter", "_leave"])
def test_an_interrupted_call_costs_its_slot_at_most(
    listener: StreamListener, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with both(listener, sizes=ChannelSizes(1, 8192, 8192)) as (host, _):
        assert call(host, b"before") == b"before"

        def interrupted(*_: object) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(host, where, interrupted)
        n_inside = host._n_inside
        with pytest.raises(KeyboardInterrupt):
            call(host, b"interrupted")
        host._n_inside = n_inside
        for body in (b"after", b"and on"):
            assert call(host, body) == body


def test_a_slot_that_was_interrupted_with_the_lane_in_hand_gives_it_up(
    listener: StreamListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with both(listener, sizes=ChannelSizes(1, 8192, 8192)) as (host, _):
        assert host._lane is not None
        monkeypatch.setattr(host._lane, "aim", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(host, b"interrupted")
        assert call(host, b"after") == b"after"


@only_plain
def test_a_request_that_the_host_was_told_is_not_here_is_not_taken(listener: StreamListener) -> None:
    server = OnDemand()
    end = listener.open_channel(SIZES, server)
    with bare_lane(listener, end) as connection, bare_dealer(listener.port, end.routing_id) as dealer:
        ping = frame(4, kind=Kind.PING)
        dealer.send_multipart([TAG.pack(4, 0, len(ping)), ping])
        assert dealer.recv_multipart()[1] == ping
        connection.sendall(frame(4, b"was on its way"))
        assert is_closed(connection)
        assert server.requests.empty()
    end.close()


def test_a_reply_of_another_length_than_it_says_comes_another_way(listener: StreamListener) -> None:
    def short(channel: ServerChannel, slot: ServerSlot) -> None:
        slot.reply[: slot.n_bytes] = slot.request[: slot.n_bytes]
        channel.reply(slot, slot.n_bytes - 1)

    with both(listener, short) as (host, _):
        assert call(host, b"body") == b"bod"


@pytest.mark.parametrize("what", ["nobody", "silence", "closed"])
def test_where_the_lane_cannot_be_opened_the_channel_works_without(
    listener: StreamListener, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeoffload.transport.laned.OPEN_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = int(other.getsockname()[1])
        if what == "nobody":
            other.close()
        token = {"lane_token": bytes(TOKEN_BYTES).hex()} if what == "closed" else {}
        place = {} if what == "closed" else {"lane_port": str(port)}
        with both(listener, other=place | token) as (host, _):
            assert host.remark.startswith("without a lane: port")
            assert call(host, b"all the same") == b"all the same"


@pytest.mark.parametrize("wrong", [{"lane_port": "70000"}, {"lane_token": "abcd"}, {"lane_port": "0"}])
def test_an_offer_of_a_lane_that_makes_no_sense_is_left_alone(listener: StreamListener, wrong: dict[str, str]) -> None:
    with both(listener, other=wrong) as (host, _):
        assert call(host, b"all the same") == b"all the same"


@pytest.mark.parametrize("wrong", [{"lane_port": "x"}, {"lane_token": "no digits"}])
def test_an_offer_of_a_lane_that_cannot_be_read_is_refused(listener: StreamListener, wrong: dict[str, str]) -> None:
    with pytest.raises(ServerError, match="offer of a stream channel"), both(listener, other=wrong):
        pass


def test_a_secret_opens_one_lane(listener: StreamListener) -> None:
    with both(listener) as (host, server):
        token = bytes.fromhex(server.offer.parameters["lane_token"])
        for said in (token, bytes(TOKEN_BYTES)):
            with socket.create_connection(("127.0.0.1", port_of(listener)), SOON_S) as stranger:
                stranger.sendall(said)
                assert is_closed(stranger)
        assert call(host, b"still mine") == b"still mine"
        assert listener.lane_door is not None
        eventually(lambda: listener.lane_door is not None and listener.lane_door.n_refused == 2)


def test_strangers_who_say_nothing_keep_nobody_out(listener: StreamListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_door, "INTRODUCTION_S", 0.2)
    with contextlib.ExitStack() as stack:
        place = ("127.0.0.1", port_of(listener))
        strangers = [
            stack.enter_context(socket.create_connection(place, SOON_S)) for _ in range(lane_door.MOST_STRANGERS + 8)
        ]
        strangers[-1].sendall(b"half")
        host, _ = stack.enter_context(both(listener))
        assert host.remark == ""
        for stranger in strangers:
            assert is_closed(stranger)


def test_a_closed_channel_opens_no_lane(listener: StreamListener) -> None:
    server = listener.open_channel(SIZES, echo, StreamKeys.new().public)
    server.close()
    with socket.create_connection(("127.0.0.1", port_of(listener)), SOON_S) as connection:
        connection.sendall(bytes.fromhex(server.offer.parameters["lane_token"]))
        assert is_closed(connection)


@only_plain
def test_bytes_may_come_one_by_one(listener: StreamListener) -> None:
    server = listener.open_channel(SIZES, echo)
    with bare_lane(listener, server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = frame(6, b"slowly")
        for at in range(len(data)):
            connection.sendall(data[at : at + 1])
            time.sleep(0.001)
        assert read(connection, len(data)) == data
    server.close()


LIES = {
    "a body that is too long": frame(6)[:32] + (2**40).to_bytes(8, "little") + frame(6)[40:],
    "a negative length": frame(6)[:32] + b"\xff" * 8 + frame(6)[40:],
    "a frame that does not fit into a slot": frame(6, bytes(SIZES.request_bytes)),
    "two requests at once": frame(5, b"one") + frame(6, b"two"),
    "one for a slot that is in use": frame(4, b"busy"),
}


@only_plain
@pytest.mark.parametrize("what", LIES)
def test_who_breaks_the_rules_loses_the_lane_and_nothing_else(listener: StreamListener, what: str) -> None:
    server = OnDemand()
    end = listener.open_channel(SIZES, server)
    with bare_lane(listener, end) as connection:
        connection.sendall(frame(4, b"first"))
        first = server.take()
        connection.sendall(LIES[what])
        assert is_closed(connection)
        echo(*first)  # goes nowhere: nobody is connected any more
    with both(listener) as (host, _):
        assert call(host, b"others") == b"others"
    assert server.requests.empty()
    end.close()


@only_plain
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.builds(frame, st.integers(0, 20), st.binary(max_size=64), st.sampled_from(Kind)),
        ),
        max_size=4,
    )
)
def test_any_bytes_leave_the_listener_usable(listener: StreamListener, pieces: list[bytes]) -> None:
    end = listener.open_channel(SIZES, echo)
    with bare_lane(listener, end) as connection, contextlib.suppress(OSError):
        for piece in pieces:
            connection.sendall(piece)
    end.close()
    with both(listener) as (host, _):
        assert call(host, b"others") == b"others"
        assert host.remark == ""


@only_sealed
def test_nobody_reads_along(listener: StreamListener) -> None:
    wire = Wire(listener)
    with both(listener, other={"lane_port": str(wire.port)}) as (host, _):
        n_before = len(wire.seen)
        for _ in range(2):
            assert call(host, b"nobody else's business") == b"nobody else's business"
        boxes = wire.seen[n_before:]
        assert len(boxes) == 4
        assert len(set(boxes)) == 4, "the same frame is never the same box"
        for box in boxes:
            assert b"business" not in box
            assert b"MOEX" not in box
            assert len(box) == HEADER_BYTES + 22 + BOX_BYTES


@only_sealed
@pytest.mark.parametrize("at", [0, 7, 8, 23, 24, 60, -1])
def test_a_changed_box_ends_the_lane_and_the_call_is_answered(listener: StreamListener, at: int) -> None:
    wire = Wire(listener)
    with both(listener, other={"lane_port": str(wire.port)}) as (host, end):
        assert call(host, b"before") == b"before"

        def flip(data: bytes) -> bytes:
            wire.change = lambda data: data
            changed = bytearray(data)
            changed[at] ^= 1
            return bytes(changed)

        wire.change = flip
        slot = host.acquire(SOON_S)
        send(host, slot, b"changed")
        assert host.wait(slot, SOON_S) == HEADER_BYTES + len(b"changed")
        assert reader_of(end)._closed
        host.release(slot)
        assert call(host, b"after") == b"after"


@only_sealed
def test_a_box_that_comes_again_is_no_request(listener: StreamListener) -> None:
    wire, server = Wire(listener), OnDemand()
    with both(listener, server, other={"lane_port": str(wire.port)}) as (host, end):
        slot = host.acquire(SOON_S)
        request_id = send(host, slot, b"once")
        box = wire.seen[-1]
        server.answer()
        assert receive(host, slot, request_id) == b"once"
        wire.far.sendall(box)
        reader_of(end)._thread.join(SOON_S)
        assert reader_of(end)._closed
        host.release(slot)
        assert server.requests.empty()


@only_sealed
def test_a_box_of_another_key_is_no_request(listener: StreamListener) -> None:
    server = OnDemand()
    keys = StreamKeys.new()
    end = listener.open_channel(SIZES, server, keys.public)
    wrong = LaneKey.agree(StreamKeys.new().secret, end.offer.parameters["server_key"], server=False)
    with bare_lane(listener, end) as connection:
        lane = Lane(connection, room=1024, most_bytes=LANE_BYTES, key=wrong)
        assert lane.send(memoryview(bytearray(frame(4, b"let me in"))))
        reader_of(end)._thread.join(SOON_S)
        assert reader_of(end)._closed
    assert server.requests.empty()
    end.close()


@only_sealed
def test_without_libsodium_there_is_no_lane(listener: StreamListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_key, "_sodium", lambda: None)
    with both(listener) as (host, server):
        assert "lane_port" not in server.offer.parameters
        assert call(host, b"all the same") == b"all the same"


def test_both_sides_agree_on_a_key_and_nobody_else() -> None:
    host, server, other = StreamKeys.new(), StreamKeys.new(), StreamKeys.new()

    def key(secret: StreamKeys, public: StreamKeys) -> bytes:
        agreed = LaneKey.agree(secret.secret, public.public, server=False)
        assert agreed is not None
        return ctypes.string_at(agreed.address, 32)

    assert key(host, server) == key(server, host)
    assert len({key(host, server), key(host, other), key(other, server)}) == 3
    nothing = z85.encode(bytes(32)).decode()
    assert LaneKey.agree(host.secret, nothing, server=True) is None, "a key that fits every secret"


@pytest.mark.parametrize("encrypted", [False, True])
@only_plain
def test_a_port_in_use_is_named(listener: StreamListener, encrypted: bool) -> None:
    with pytest.raises(ServerError, match=str(port_of(listener))):
        StreamListener(max_request_bytes=1024, lane_port=port_of(listener), encrypted=encrypted)
