"""A network namespace at the other end of a pair of virtual cards; only root may make one."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Final

FAR_CARD: Final = "eth0"
"""The name of the card inside of the namespace."""
STEP_S: Final = 20.0


def ip(*words: str) -> None:
    """Runs iproute2's ``ip``. Raises OSError, subprocess.SubprocessError: it is not here, or refuses."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=STEP_S)


@contextlib.contextmanager
def virtual_cable(namespace: str, card: str, near: str, far: str) -> Iterator[None]:
    """Makes the namespace and both cards, with the addresses ``near`` (of ``card``) and ``far`` of one /30 network.
    Raises what `ip` does."""
    with contextlib.ExitStack() as stack:
        ip("netns", "add", namespace)
        stack.callback(ip, "netns", "del", namespace)
        ip("link", "add", card, "type", "veth", "peer", "name", FAR_CARD, "netns", namespace)
        stack.callback(ip, "link", "del", card)
        ip("address", "add", f"{near}/30", "dev", card)
        ip("-n", namespace, "address", "add", f"{far}/30", "dev", FAR_CARD)
        ip("link", "set", card, "up")
        ip("-n", namespace, "link", "set", FAR_CARD, "up")
        ip("-n", namespace, "link", "set", "lo", "up")
        yield
