"""TLS before the control plane: finishes handshakes and passes the bytes on to gRPC, which listens on loopback.

gRPC has TLS of its own, but a handshake that fails there leaves no trace: nobody could tell an attack from silence.
Here every failure is counted and logged with its peer and reason, and a handshake has a deadline. Only the control
plane comes through here, never rows. The control plane's gate refuses calls on connections that are not of this front.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from typing import Final

from moeoffload.errors import ServerError
from moeoffload.refusals import Refusals

HANDSHAKE_S: Final = 10.0
MAX_CONNECTIONS: Final = 64
"""More are closed at once: eight hosts need one each, and the rest is for health checks and people."""
STOP_S: Final = 2.0
_BUFFER_BYTES: Final = 256 * 1024
"""Most bytes that wait for a slow side; then the other one is not read."""

_PLAIN_REASONS: Final = {"HTTP_REQUEST", "WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTPS_PROXY_REQUEST"}

log = logging.getLogger(__name__)


class TlsFront:
    """Listens from its making on; serves after `start`. One thread."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext, refusals: Refusals) -> None:
        """Binds ``host``:``port``, 0 for a free one.

        Raises:
            ServerError: the address cannot be bound.
        """
        self._context = context
        self._refusals = refusals
        self._peers: dict[int, str] = {}
        self._backend = 0
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._socket = _listen(host, port)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._run, name="tls-front", daemon=True)

    def start(self, backend: int) -> None:
        """Passes connections on to the port ``backend`` of 127.0.0.1."""
        self._backend = backend
        self._thread.start()

    def peer_of(self, port: int) -> str | None:
        """Who is behind the connection that this front made from its ``port``, as gRPC writes peers."""
        return self._peers.get(port)

    def stop(self) -> None:
        """Closes all connections and the port. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)
        elif not self._loop.is_closed():
            self._loop.close()
        self._socket.close()

    def _run(self) -> None:
        loop = self._loop
        try:
            server = loop.run_until_complete(loop.create_server(lambda: _Incoming(self), sock=self._socket))
            loop.run_forever()
            server.close()
            loop.run_until_complete(self._end_connections())
        finally:
            loop.close()

    async def _end_connections(self) -> None:
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        if connections:
            await asyncio.wait(connections, timeout=STOP_S / 2)

    def accept(self, incoming: _Incoming, transport: asyncio.Transport) -> None:
        """Takes on a new connection, if there is room."""
        peer = _peer_name(transport)
        if len(self._connections) >= MAX_CONNECTIONS:
            self._refusals.add(peer, f"there are {MAX_CONNECTIONS} connections already")
            transport.abort()
            return
        task = self._loop.create_task(self._serve(incoming, transport, peer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, incoming: _Incoming, raw: asyncio.Transport, peer: str) -> None:
        near: asyncio.Transport | None = None
        near_port: int | None = None
        try:
            near = await self._handshake(incoming, raw, peer)
            if near is None:
                return
            near.pause_reading()
            outgoing = socket.socket()
            try:
                outgoing.setblocking(False)
                outgoing.bind(("127.0.0.1", 0))
                # Before gRPC can see the connection, and until it is gone: the gate asks whose it is.
                near_port = int(outgoing.getsockname()[1])
                self._peers[near_port] = peer
                await self._loop.sock_connect(outgoing, ("127.0.0.1", self._backend))
                far = _Pipe()
                far_transport, _ = await self._loop.create_connection(lambda: far, sock=outgoing)
            except OSError:
                outgoing.close()
                raise
            try:
                incoming.pipe.join(near, far_transport)
                far.join(far_transport, near)
                near.resume_reading()
                await asyncio.wait({incoming.pipe.ended, far.ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                far_transport.abort()
        except OSError as error:
            log.debug("%s: %s", peer, error)
        finally:
            if near is not None:
                near.close()
            raw.abort() if near is None else self._loop.call_later(STOP_S, raw.abort)
            if near_port is not None:
                self._peers.pop(near_port, None)

    async def _handshake(self, incoming: _Incoming, raw: asyncio.Transport, peer: str) -> asyncio.Transport | None:
        """The encrypted transport, delivering to the pipe of ``incoming``; None if the peer was refused."""
        try:
            return await self._loop.start_tls(
                raw, incoming.pipe, self._context, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
        except ssl.SSLError as error:
            reason = _why(error)
        except ConnectionAbortedError:  # how asyncio says that the time is over
            reason = f"its TLS handshake took longer than {HANDSHAKE_S:g} s"
        except OSError:
            reason = "it closed the connection during the TLS handshake"
        self._refusals.add(peer, reason)
        return None


class _Pipe(asyncio.Protocol):
    """Passes what arrives on one transport on to another, not faster than that takes it."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._to: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def join(self, own: asyncio.Transport, to: asyncio.Transport) -> None:
        """From now on what arrives on ``own`` goes to ``to``."""
        self._to = to
        own.set_write_buffer_limits(_BUFFER_BYTES)
        for data in self._early:
            to.write(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        if self._to is None:
            self._early.append(data)  # came with the end of the handshake; reading pauses until both sides are there
        else:
            self._to.write(data)

    def pause_writing(self) -> None:
        if self._to is not None:
            self._to.pause_reading()

    def resume_writing(self) -> None:
        if self._to is not None:
            self._to.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class _Incoming(asyncio.Protocol):
    """A connection before its handshake. Reads nothing itself: TLS takes the transport over with all that arrives."""

    def __init__(self, front: TlsFront) -> None:
        self._front = front
        self.pipe = _Pipe()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        self._front.accept(self, transport)


def _why(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted ({error.verify_message})"
    reason = error.reason or ""
    if reason in _PLAIN_REASONS:
        return "it does not speak TLS, which this server wants"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it showed no certificate; this server wants one that its --client-ca vouches for"
    if "ALERT" in reason:
        return f"it does not accept this server ({reason.lower().replace('_', ' ')})"
    return f"the TLS handshake failed ({reason.lower().replace('_', ' ') or 'no reason given'})"


def _peer_name(transport: asyncio.Transport) -> str:
    name = transport.get_extra_info("peername")
    if not name:
        return "ipv4:unknown:0"
    return f"ipv6:[{name[0]}]:{name[1]}" if ":" in name[0] else f"ipv4:{name[0]}:{name[1]}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family is socket.AF_INET6 and host == "::"
        return socket.create_server(address[:2], family=family, dualstack_ipv6=both, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise ServerError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
