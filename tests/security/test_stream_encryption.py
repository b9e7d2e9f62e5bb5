"""Rows on the stream transport: nobody on the way can read them, and each host reaches its own channel only."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fault_kit.proxy import proxy_of
from transport.ends import SIZES, SOON_S, call, echo, eventually

from moeoffload.errors import DeadlineError, ProtocolError, ServerError
from moeoffload.transport import HostChannel, StreamKeys, StreamListener, StreamServerEnd, open_channel
from moeoffload.transport.stream import StreamHostEnd

PATTERN = os.urandom(64)


@pytest.fixture
def refused() -> list[str]:
    """Why peers were."""
    return []


@pytest.fixture
def listener(refused: list[str]) -> Iterator[StreamListener]:
    listener = StreamListener(encrypted=True, on_refused=lambda peer, why: refused.append(why))
    yield listener
    listener.close()


def attached(listener: StreamListener) -> tuple[StreamServerEnd, HostChannel, StreamKeys]:
    keys = StreamKeys.new()
    channel = listener.open_channel(SIZES, echo, keys.public)
    return channel, open_channel(channel.offer, host="127.0.0.1", timeout_s=SOON_S, keys=keys, encrypted=True), keys


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_capture_of_the_wire_shows_rows_only_without_encryption(tmp_path: Path, encrypted: bool) -> None:
    listener = StreamListener(encrypted=encrypted)
    keys = StreamKeys.new()
    with proxy_of(listener.port) as proxy:
        proxy.tell("record", tmp_path / "captured")
        offer = listener.open_channel(SIZES, echo, keys.public).offer
        host = open_channel(offer, host=proxy.here, timeout_s=SOON_S, keys=keys)
        assert call(host, PATTERN * 100) == PATTERN * 100
        host.close()
    listener.close()
    captured = (tmp_path / "captured").read_bytes()
    assert len(captured) > 2 * 100 * len(PATTERN), "both ways were captured"
    assert (PATTERN in captured) == (not encrypted)
    assert keys.secret.encode() not in captured


def test_several_hosts_reach_their_own_channels(listener: StreamListener, refused: list[str]) -> None:
    ends = [attached(listener) for _ in range(3)]
    for n, (_, host, _) in enumerate(ends):
        assert call(host, bytes([n]) * 1000) == bytes([n]) * 1000
    ends[0][0].close()
    with pytest.raises(ServerError, match="closed"):
        call(ends[0][1])
    assert call(ends[1][1], b"on") == b"on"
    assert refused == []
    for _, host, _ in ends:
        host.close()


def test_a_host_that_reconnects_goes_on(listener: StreamListener) -> None:
    keys = StreamKeys.new()
    offer = listener.open_channel(SIZES, echo, keys.public).offer
    with proxy_of(listener.port) as proxy:
        host = open_channel(offer, host=proxy.here, timeout_s=SOON_S, keys=keys)
        assert call(host, b"before") == b"before"
        proxy.tell("cut")
        proxy.tell("mend")
        answers: list[bytes] = []

        def answered() -> bool:
            with contextlib.suppress(DeadlineError):  # sent into the old connection
                answers.append(call(host, b"after", timeout_s=0.5))
            return bool(answers)

        eventually(answered)
        assert answers == [b"after"]
        host.close()


def test_keys_that_were_never_admitted_or_whose_session_has_ended_are_refused(
    listener: StreamListener, refused: list[str]
) -> None:
    channel, host, stolen = attached(listener)
    for keys in (StreamKeys.new(), stolen):
        refused.clear()
        with pytest.raises(DeadlineError):
            open_channel(channel.offer, host="127.0.0.1", timeout_s=0.5, keys=keys)
        eventually(lambda: "not of an open lease" in " ".join(refused))
        if keys is not stolen:
            assert call(host, b"undisturbed") == b"undisturbed"
            host.close()
            channel.close()


def test_the_public_key_of_another_session_cannot_be_claimed(listener: StreamListener, refused: list[str]) -> None:
    _, host, keys = attached(listener)
    with pytest.raises(ServerError, match="in use by another lease"):
        listener.open_channel(SIZES, echo, keys.public)
    assert "that of another open lease" in " ".join(refused)
    assert call(host, b"undisturbed") == b"undisturbed"
    host.close()


def test_the_routing_id_of_another_session_is_of_no_use(listener: StreamListener, refused: list[str]) -> None:
    victim, host, _ = attached(listener)
    assert call(host, b"mine") == b"mine"
    mine = StreamKeys.new()
    own = listener.open_channel(SIZES, echo, mine.public)
    before = listener.n_unknown
    server_key = listener.public_key.encode()
    thief = StreamHostEnd(SIZES, f"tcp://127.0.0.1:{listener.port}", victim.routing_id, (mine, server_key))
    with pytest.raises(DeadlineError):
        thief.greet(0.6)
    assert "routing id of another lease" in " ".join(refused)
    assert listener.n_unknown > before
    assert victim.is_stolen, "nothing of the victim's is sent where the thief sits"
    assert (victim.n_dropped, own.n_dropped) == (0, 0)
    thief.close()
    host.close()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
"""Of ZMTP 3.0, with the mechanism that encrypts nothing."""


@pytest.mark.parametrize(
    ("sent", "leaves_first"),
    [(GREETING, False), (GREETING, True), (GREETING[:20], True), (b"GET / HTTP/1.1\r\n\r\n", True), (b"", True)],
)
def test_every_broken_handshake_is_told_once(
    listener: StreamListener, refused: list[str], sent: bytes, leaves_first: bool
) -> None:
    _, host, _ = attached(listener)
    with socket.create_connection(("127.0.0.1", listener.port), SOON_S) as peer:
        peer.sendall(sent)
        if not leaves_first:
            with contextlib.suppress(ConnectionResetError):
                while peer.recv(4096):
                    pass
    eventually(lambda: "does not speak CURVE" in " ".join(refused))
    assert call(host, b"undisturbed") == b"undisturbed"
    assert len(refused) == 1
    host.close()


@pytest.mark.parametrize("key", ["", "x", "\N{SNOWMAN}" * 40, "~" * 40, "0" * 41])
def test_what_is_no_key_is_refused(listener: StreamListener, key: str) -> None:
    with pytest.raises(ProtocolError, match="stream key of the host"):
        listener.open_channel(SIZES, echo, key)
    if key:
        channel, host, _ = attached(listener)
        offer = replace(channel.offer, parameters=channel.offer.parameters | {"server_key": key})
        with pytest.raises(ProtocolError, match="stream key of the server"):
            open_channel(offer, host="127.0.0.1", timeout_s=1, keys=StreamKeys.new())
        host.close()


def test_a_host_that_wants_encryption_takes_nothing_less() -> None:
    plain = StreamListener()
    offer = plain.open_channel(SIZES, echo).offer
    with pytest.raises(ProtocolError, match="without encryption"):
        open_channel(offer, host="127.0.0.1", timeout_s=1, keys=StreamKeys.new(), encrypted=True)
    plain.close()


def test_secrets_are_not_in_reprs(listener: StreamListener) -> None:
    keys = StreamKeys.new()
    channel = listener.open_channel(SIZES, echo, keys.public)
    assert keys.secret not in repr(keys)
    assert listener.public_key not in repr(channel.offer)
