"""Where lanes come in: one listening socket for all hosts of a server, and the thread that looks who they are.

A host says the secret of its attach first, and has little time for that. Each secret opens one lane.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from moeoffload.errors import ServerError
from moeoffload.kernels.lane_program import lane_programs
from moeoffload.transport.lane import TOKEN_BYTES
from moeoffload.transport.stream_keys import OnRefused

INTRODUCTION_S: Final = 5.0
"""How long a connection may take to say who it is."""
MOST_STRANGERS: Final = 64
"""Connections that have not said yet who they are; with one more the oldest has to go."""
_POLL_S: Final = 0.5
_CROWDED_S: Final = 0.1
"""Between two tries to accept when there are too few file descriptors, or there is too little memory."""

Enter = Callable[[socket.socket], bool]
"""Takes a connection whose secret was right; False, and it is closed here, if it comes too late."""

log = logging.getLogger(__name__)


class _Stranger:
    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self.connection = connection
        self.token = bytearray()
        self.deadline = time.monotonic() + INTRODUCTION_S


class LaneDoor:
    """Listens until it is closed.

    Attributes:
        port: the TCP port, also when a free one was asked for.
        n_refused: connections that did not say the secret of an open attach.
    """

    def __init__(self, host: str, port: int, on_refused: OnRefused) -> None:
        """Binds and starts to accept; ``host`` is an address or ``*`` for all; ``on_refused``: see `StreamListener`.

        Raises:
            ServerError: the address cannot be bound.
        """
        lane_programs()  # compiles, if need be: hosts that come have little time
        self.n_refused = 0
        self._on_refused = on_refused
        self._expected: dict[bytes, Enter] = {}
        self._using = threading.Lock()
        anywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
        address = anywhere if host in ("*", "::", "[::]") else host.strip("[]")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, port), family=family, dualstack_ipv6=address == "::")
        except OSError as error:
            raise ServerError(f"cannot listen at {host}:{port}: {error}") from error
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._strangers: dict[int, _Stranger] = {}
        self._poll = select.poll()
        for fd in (self._wake_fd, self._listener.fileno()):
            self._poll.register(fd, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="lane-door", daemon=True)
        self._thread.start()

    def expect(self, enter: Enter) -> str:
        """The secret, in hexadecimal digits, with which a host can open one lane."""
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._using:
            self._expected[token] = enter
        return token.hex()

    def forget(self, token: str) -> None:
        """The secret is good for nothing any more."""
        with self._using:
            self._expected.pop(bytes.fromhex(token), None)

    def close(self) -> None:
        """Listens no more. Idempotent."""
        with self._using:
            first, self._closing = not self._closing, True
        if first:
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
            for stranger in list(self._strangers.values()):
                self._dismiss(stranger)
            self._listener.close()
            os.close(self._wake_fd)

    def _run(self) -> None:
        while not self._closing:
            try:
                self._look(self._poll.poll(_POLL_S * 1000))
            except Exception:  # this thread is for all hosts
                log.exception("a lane could not be opened")

    def _look(self, events: list[tuple[int, int]]) -> None:
        for fd, _ in events:
            if fd == self._listener.fileno():
                self._accept()
            elif (stranger := self._strangers.get(fd)) is not None:
                self._listen_to(stranger)
        now = time.monotonic()
        for stranger in [each for each in self._strangers.values() if each.deadline < now]:
            self._refuse(stranger)

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):  # it stays in line, and the poll would not wait
                time.sleep(_CROWDED_S)
            return
        connection.setblocking(False)
        while len(self._strangers) >= MOST_STRANGERS:
            self._refuse(next(iter(self._strangers.values())))
        self._strangers[connection.fileno()] = _Stranger(connection, f"{peer[0]}:{peer[1]}")
        self._poll.register(connection, select.POLLIN)

    def _listen_to(self, stranger: _Stranger) -> None:
        try:
            said = stranger.connection.recv(TOKEN_BYTES - len(stranger.token))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        stranger.token += said
        if not said:
            self._refuse(stranger)
        elif len(stranger.token) == TOKEN_BYTES:
            with self._using:
                enter = self._expected.pop(bytes(stranger.token), None)
            if enter is None:
                self._refuse(stranger)
                return
            self._let_go(stranger)
            if not enter(stranger.connection):
                stranger.connection.close()

    def _refuse(self, stranger: _Stranger) -> None:
        self.n_refused += 1
        self._dismiss(stranger)
        self._on_refused(stranger.peer, "its lane did not say the secret of an open attach")

    def _let_go(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection.fileno()]
        self._poll.unregister(stranger.connection)

    def _dismiss(self, stranger: _Stranger) -> None:
        self._let_go(stranger)
        with contextlib.suppress(OSError):
            stranger.connection.close()
