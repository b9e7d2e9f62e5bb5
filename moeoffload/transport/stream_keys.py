"""CURVE keys of the stream transport, and the `Door` of a listener, which admits only the keys of attached hosts.

The host makes a fresh key pair for each attach; its public half, and the server's, travel over the control plane.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from moeoffload.errors import ProtocolError
from moeoffload.last_resort import start_thread
from moeoffload.transport.base import OnFailure

KEY_CHARACTERS: Final = 40
"""A key is 32 bytes, written as 40 characters of Z85."""
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_DOMAIN: Final = "moeoffload"
_COMINGS_AND_GOINGS: Final = zmq.Event.ACCEPTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
"""Must not contain HANDSHAKE_FAILED_PROTOCOL: with a monitor of that event libzmq 4.3.5 does not close a connection on
which a message fails authentication; it stops reading from it and in the end aborts the process."""

OnRefused = Callable[[str, str], None]
"""Called with the refused peer and the reason."""


@dataclass(frozen=True)
class StreamKeys:
    """A key pair as Z85 text."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> StreamKeys:
        """Makes a fresh pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


def check_key(text: str, of_whom: str) -> bytes:
    """Returns a public key from the other side in ZeroMQ's form. Raises ProtocolError: it is not a key."""
    try:
        key = text.encode("ascii")
        if len(key) != KEY_CHARACTERS or len(z85.decode(key)) != 32:
            raise ValueError
    except (ValueError, KeyError):
        raise ProtocolError(f"the stream key of the {of_whom} is not {KEY_CHARACTERS} characters of Z85") from None
    return key


def encrypt_host_end(socket: zmq.Socket[bytes], keys: StreamKeys, server: bytes) -> None:
    """Makes a socket that is not connected yet talk only to the owner of the key ``server``."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


class Door:
    """Answers ZeroMQ's authentication requests (ZAP, https://rfc.zeromq.org/spec/27/) in a thread of its own.

    pyzmq's ThreadAuthenticator does so too, but does not report which peer was refused.

    Attributes:
        public_key: the listener's key as Z85 text; the key pair is made for this listener alone.
        admitted: the keys with which connections may be opened. The listener must drop messages of connections that are
            open with a key that was removed.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_refused: OnRefused, on_failure: OnFailure) -> None:
        """Makes a socket that is not bound yet accept CURVE only; no key is admitted yet."""
        keys = StreamKeys.new()
        self.public_key = keys.public
        self._on_refused = on_refused
        self.admitted: set[str] = set()
        self._socket = socket
        self._questions = socket.context.socket(zmq.REP)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind(_ZAP_ENDPOINT)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer nobody is admitted
        self._connections = socket.get_monitor_socket(_COMINGS_AND_GOINGS)
        self._shaking_hands: set[int] = set()
        """File descriptors of open connections for which no key was seen yet."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = start_thread("stream-door", self._answer, on_failure)

    def stop(self) -> None:
        """Ends the thread; admits no more peers. Call it once, before closing the socket, which waits for it."""
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)
        self._socket.disable_monitor()
        self._connections.close(0)
        self._questions.close()

    def _answer(self) -> None:
        poller = zmq.Poller()
        for source in (self._questions, self._connections, self._wake_fd):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake_fd in ready:
                return
            self._follow_connections()
            if self._questions in ready:
                question = self._questions.recv_multipart()
                self._follow_connections()  # the connection of this question was accepted before
                # Neither the question nor the success event identifies the connection: the few others that are in a
                # handshake at this moment are forgotten too, and their failure is not reported.
                self._shaking_hands.clear()
                self._questions.send_multipart(self._decide(question))

    def _follow_connections(self) -> None:
        while self._connections.poll(0):
            event = recv_monitor_message(self._connections)
            if event["event"] == zmq.Event.ACCEPTED:
                self._shaking_hands.add(int(event["value"]))
            elif event["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._shaking_hands.clear()
            elif int(event["value"]) in self._shaking_hands:
                self._shaking_hands.remove(int(event["value"]))
                self._on_refused("a peer on the stream port", "it does not speak CURVE, or broke the handshake off")

    def _decide(self, question: list[bytes]) -> list[bytes]:
        if len(question) < 7 or question[0] != _ZAP_VERSION:
            return [_ZAP_VERSION, question[1] if len(question) > 1 else b"", b"500", b"not understood", b"", b""]
        _, number, _, address, _, mechanism, key, *_ = question
        if mechanism == b"CURVE" and len(key) == 32 and (text := z85.encode(key).decode()) in self.admitted:
            return [_ZAP_VERSION, number, b"200", b"OK", text.encode(), b""]
        self._on_refused(address.decode("ascii", "replace"), "its stream key is not of an open lease")
        return [_ZAP_VERSION, number, b"400", b"unknown key", b"", b""]
