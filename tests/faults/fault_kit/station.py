"""A server that is told to misbehave, and the proxy in front of it: what a host knows as one address."""

from __future__ import annotations

import contextlib
import functools

from server_processes import STEP_TIMEOUT_S, WARM, ServerProcess

from fault_kit.bad_replies import spoil_replies
from fault_kit.proxy import Proxy
from moeoffload.control.user_token import UserToken, user_tokens


class FaultyServer(ServerProcess):
    """A server whose replies can be spoiled."""

    def start(self, *more: str) -> None:
        theirs, self._orders = WARM.Pipe()
        self._patch = functools.partial(spoil_replies, theirs)
        super().start(*more)
        theirs.close()

    def spoil(self, how: str, n: int = 1) -> None:
        """Spoils the next ``n`` replies; see `bad_replies.SPOILERS`."""
        self._orders.send((how, n))
        assert self._orders.poll(STEP_TIMEOUT_S)
        with contextlib.suppress(EOFError):  # it may die of the order before it says that it has it
            self._orders.recv()


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
