"""A server and the proxy in front of it: what a host knows as one address."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fault_kit.proxy import Proxy
from fault_kit.server import ServerProcess
from moeoffload.control.user_token import UserToken, user_tokens

SERVER_HOST: Final = "127.0.0.1"
PROXY_HOST: Final = "127.0.0.2"


class Station:
    """Hosts that are given ``address`` reach the server through the proxy only, both planes. ``close`` it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.server = ServerProcess(folder, *options, host=SERVER_HOST)
        self.proxy = Proxy(PROXY_HOST, SERVER_HOST)
        self.address = f"{PROXY_HOST}:{self.server.port}"
        self._tokens: list[UserToken] = []
        self._forward()

    def _forward(self) -> None:
        """Lets hosts reach the server that runs now, and find its token at the proxy's address."""
        port = self.server.port
        self._tokens += [UserToken.write(PROXY_HOST, port, token) for token in user_tokens(SERVER_HOST, port)]
        self.proxy.forward(self.server.ports())

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
        self._forward()

    def close(self) -> None:
        self.server.close()
        self.proxy.close()
        for token in self._tokens:
            token.remove()
