"""What is not a well-behaved peer: a bare DEALER, and a TCP proxy whose connections can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import zmq

from .ends import SOON_S


@contextlib.contextmanager
def bare_dealer(port: int, routing_id: bytes) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, routing_id)
        dealer.setsockopt(zmq.RCVTIMEO, int(SOON_S * 1000))
        dealer.connect(f"tcp://127.0.0.1:{port}")
        yield dealer


class Proxy:
    """Forwards TCP connections to a port, until told to cut them."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._connections: list[socket.socket] = []
        self._up = True
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """Resets all connections; new ones are refused until ``mend``."""
        self._up = False
        self._shutdown()

    def mend(self) -> None:
        self._up = True

    def close(self) -> None:
        self._up = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._shutdown()
        for thread in self._threads:
            thread.join(SOON_S)

    def _shutdown(self) -> None:
        while self._connections:
            with contextlib.suppress(OSError):
                self._connections.pop().shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._up:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._target))
            self._connections += [near, far]
            for source, sink in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._forward, args=(source, sink)))
                self._threads[-1].start()

    @staticmethod
    def _forward(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
        source.close()
