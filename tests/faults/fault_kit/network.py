"""Cables of hosts that can be unplugged: network namespaces where the machine allows it, else proxies at 127.0.0.x."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
from pathlib import Path
from typing import Final, Protocol

from fault_kit.proxy import Proxy
from fault_kit.server import ServerProcess

_CLONE_NEWNET: Final = 0x40000000
_FOLDER: Final = Path("/var/run/netns")
COMMAND_TIMEOUT_S: Final = 20


class Cable(Protocol):
    """What connects one host with the server."""

    address: str
    """HOST:PORT of the server, for the host at the other end."""
    namespace: str | None
    """Where that host has to run; None: anywhere."""

    def unplug(self) -> None:
        """Nothing passes any more, in neither direction, and nobody is told."""

    def plug(self) -> None:
        """It passes again."""

    def close(self) -> None:
        """Takes everything away. Idempotent."""


class NamespaceCable:
    """A pair of virtual network cards, one of them in a namespace of its own; ``number`` sets the two apart."""

    def __init__(self, server: ServerProcess, number: int) -> None:
        pid = os.getpid()
        self.namespace: str | None = f"moeoffload-{pid}-{number}"
        self._card = f"moe{pid % 100000}-{number}"
        # Two runs of this at the same time must not meet.
        near, far = (f"10.{100 + pid % 100}.{pid // 100 % 250}.{4 * number + last}" for last in (1, 2))
        self.address = f"{near}:{server.port}"
        try:
            _ip("netns", "add", self.namespace)
            _ip("link", "add", self._card, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
            _ip("address", "add", f"{near}/30", "dev", self._card)
            _ip("link", "set", self._card, "up")
            _ip("-n", self.namespace, "address", "add", f"{far}/30", "dev", "eth0")
            _ip("-n", self.namespace, "link", "set", "eth0", "up")
            _ip("-n", self.namespace, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def unplug(self) -> None:
        _ip("link", "set", self._card, "down")

    def plug(self) -> None:
        _ip("link", "set", self._card, "up")

    def close(self) -> None:
        for words in (("link", "del", self._card), ("netns", "del", str(self.namespace))):
            with contextlib.suppress(subprocess.SubprocessError):
                _ip(*words)


class ProxyCable:
    """A proxy at a loopback address of its own."""

    namespace: str | None = None

    def __init__(self, server: ServerProcess, number: int) -> None:
        self._proxy = Proxy(f"127.0.0.{10 + number}", "127.0.0.1")
        self._proxy.forward(server.ports())
        self.address = f"{self._proxy.here}:{server.port}"

    def unplug(self) -> None:
        self._proxy.stall()

    def plug(self) -> None:
        self._proxy.mend()

    def close(self) -> None:
        self._proxy.close()


@functools.cache
def namespaces_allowed() -> bool:
    """Whether this process may make network namespaces and cards."""
    name = f"moeoffload-{os.getpid()}-probe"
    try:
        _ip("netns", "add", name)
        _ip("link", "add", f"moe{os.getpid() % 100000}-p", "type", "veth", "peer", "name", "eth0", "netns", name)
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            _ip("netns", "del", name)
    return True


def enter_namespace(name: str) -> None:
    """Moves this process, which has no threads yet, into a network namespace."""
    with (_FOLDER / name).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)
