"""A TCP proxy in a process of its own, in front of ports of one server: cuts, stalls, slows, corrupts and records.

It listens at a loopback address of its own at the very port numbers of the server, so a host that is given that address
reaches the control plane and the announced data plane through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import socket
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from server_processes import PipedProcess

MAGIC: Final = b"MOEX"
CURVE: Final = b"\x07MESSAGE"
CURVE_FRAME_BYTES: Final = 128
"""No heartbeat is as long."""
CHUNK: Final = 1 << 16
_HEADER_BYTE: Final = 24
_RESET: Final = struct.pack("ii", 1, 0)


class _Forwarder:
    """Runs in the proxy's process."""

    def __init__(self, here: str, target: str) -> None:
        self._here, self._target = here, target
        self._servers: dict[int, asyncio.Server] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._delay_s = 0.0
        self._n_corrupt = 0
        self._ports: list[int] = []
        self._tap: io.FileIO | None = None

    async def forward(self, ports: list[int]) -> None:
        """Listens at exactly these ports."""
        self._ports = ports
        for port in set(self._servers) - set(ports):
            self._servers.pop(port).close()
        for port in ports:
            if port not in self._servers:
                connected = functools.partial(self._connected, port)
                self._servers[port] = await asyncio.start_server(connected, self._here, port)

    async def cut(self) -> None:
        """Resets all connections; new ones are refused."""
        ports = self._ports
        await self.forward([])
        self._ports = ports
        for writer in list(self._writers):
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def stall(self) -> None:
        """Nothing passes; connections stay."""
        self._flows.clear()

    async def slow(self, delay_s: float) -> None:
        """Every piece is late by so many seconds."""
        self._delay_s = delay_s

    async def corrupt(self, n: int) -> None:
        """Turns one bit in each of the next ``n`` frames, whichever way they go.

        In their headers, where frames can be read; of an encrypted stream anywhere in what is long enough to be one.
        """
        self._n_corrupt = n

    async def mend(self) -> None:
        """Everything passes as it is."""
        self._delay_s, self._n_corrupt = 0.0, 0
        self._flows.set()
        await self.forward(self._ports)

    async def record(self, file: Path) -> None:
        """Whatever passes from now on is kept in this file."""
        self._tap = file.open("wb", 0)

    async def _connected(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._target, port)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        for each in pair:
            each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._writers.update(pair)
        try:
            ways = (self._pump(reader, far_writer), self._pump(far_reader, writer))
            await asyncio.wait([asyncio.ensure_future(way) for way in ways], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._writers.difference_update(pair)
            for each in pair:
                each.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(CHUNK):
                await self._flows.wait()
                if self._tap is not None:
                    self._tap.write(data)
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                writer.write(self._spoiled(data) if self._n_corrupt else data)
                await writer.drain()

    def _spoiled(self, data: bytes) -> bytes:
        at = data.find(MAGIC)
        if at < 0 and CURVE in data and len(data) >= CURVE_FRAME_BYTES:
            at = data.find(CURVE) + len(CURVE)
        if at < 0 or len(data) <= at + _HEADER_BYTE:
            return data
        self._n_corrupt -= 1
        spoiled = bytearray(data)
        spoiled[at + _HEADER_BYTE] ^= 0x10
        return bytes(spoiled)


def _run(orders: Connection, here: str, target: str) -> None:
    """In the child: carries out one order ``(name, arguments)`` after the other, and answers each."""

    async def obey() -> None:
        forwarder = _Forwarder(here, target)
        # Connections that are cut are no news here.
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        while True:
            name, arguments = await asyncio.to_thread(orders.recv)
            try:
                await getattr(forwarder, name)(*arguments)
            except Exception as error:
                orders.send(repr(error))
            else:
                orders.send(None)

    with contextlib.suppress(EOFError):
        asyncio.run(obey())


class Proxy(PipedProcess):
    """The proxy process of one server: ``here`` is the address where hosts find it. ``close`` it."""

    def __init__(self, here: str, target: str) -> None:
        self.here = here
        super().__init__(Path(os.devnull), _run, here, target)

    def tell(self, order: str, *arguments: float | list[int] | Path) -> None:
        """Has it forward, cut, stall, slow, corrupt, mend or record; see `_Forwarder`."""
        if (error := self.asks((order, arguments))) is not None:
            raise RuntimeError(f"the proxy at {self.here}: {order}: {error}")


@contextlib.contextmanager
def proxy_of(port: int) -> Iterator[Proxy]:
    """A proxy of one port of this machine."""
    with contextlib.closing(Proxy("127.0.0.2", "127.0.0.1")) as proxy:
        proxy.tell("forward", [port])
        yield proxy
