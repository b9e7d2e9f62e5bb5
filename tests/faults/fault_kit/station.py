"""A server and the proxy in front of it: what a host knows as one address."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fault_kit.proxy import Proxy
from fault_kit.server import ServerProcess

SERVER_HOST: Final = "127.0.0.1"
PROXY_HOST: Final = "127.0.0.2"


class Station:
    """Hosts that are given ``address`` reach the server through the proxy only, both planes. ``close`` it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.server = ServerProcess(folder, *options, host=SERVER_HOST)
        self.proxy = Proxy(PROXY_HOST, SERVER_HOST)
        self.proxy.forward(self.server.ports())
        self.address = f"{PROXY_HOST}:{self.server.port}"

    def kill(self) -> None:
        """kill -9; nothing listens at the address any more."""
        self.server.kill()
        self.proxy.forward([])

    def gone(self) -> None:
        """The process has ended by itself, or is about to."""
        self.server.reap()
        self.proxy.forward([])

    def start(self, *more: str) -> None:
        """A new process at the same address."""
        self.server.start(*more)
        self.proxy.forward(self.server.ports())

    def close(self) -> None:
        self.server.close()
        self.proxy.close()
