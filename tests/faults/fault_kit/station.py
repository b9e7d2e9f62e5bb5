"""A server and the proxy in front of it: what a host knows as one address."""

from __future__ import annotations

from fault_kit.proxy import Proxy
from fault_kit.server import FaultyServer
from moeoffload.control.user_token import UserToken, user_tokens


class Station:
    """Hosts that are given ``address`` reach the server through the proxy only, both planes. ``close`` it."""

    def __init__(self, server: FaultyServer, proxy_host: str) -> None:
        self.server = server
        self._server_host, _, port = server.address.rpartition(":")
        self._port = int(port)
        self.address = f"{proxy_host}:{port}"
        self.proxy = Proxy(proxy_host, self._server_host)
        self._tokens: list[UserToken] = []
        self._forward()

    def _forward(self) -> None:
        """Lets hosts reach the server that runs now, and find its token at the proxy's address."""
        tokens = user_tokens(self._server_host, self._port)
        self._tokens += [UserToken.write(self.proxy.here, self._port, token) for token in tokens]
        self.proxy.tell("forward", self.server.ports())

    def kill(self) -> None:
        """kill -9, unless it has ended by itself; nothing listens at the address any more."""
        self.server.kill()
        self.proxy.tell("forward", [])

    def start(self, *more: str) -> None:
        """A new process at the same address."""
        self.server.start(*more)
        self._forward()

    def close(self) -> None:
        """Takes the proxy away."""
        self.proxy.close()
        for token in self._tokens:
            token.remove()
