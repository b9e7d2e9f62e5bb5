"""Real processes that hold one end of a shared-memory channel, to be killed at any moment."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

from moeoffload.transport import ChannelOffer, SharedServerEnd, open_channel
from moeoffload.transport.segment import SHM_FOLDER

from .ends import SIZES, SOON_S, call, echo, send


def hold(pipe: Connection) -> None:
    """Creates a channel, says its offer, and waits to be killed."""
    pipe.send(SharedServerEnd(SIZES, echo).offer)
    pipe.recv()


def connect(pipe: Connection) -> None:
    """Opens the channel whose offer it is told, calls once, then leaves a request in flight."""
    offer: ChannelOffer = pipe.recv()
    host = open_channel(offer, host="", timeout_s=SOON_S)
    pipe.send(host.nonce)
    call(host, b"hello")
    send(host, host.acquire(SOON_S))
    pipe.send("in flight")
    pipe.recv()


def our_names() -> set[str]:
    """What of moeoffload is in /dev/shm."""
    return {name for name in os.listdir(SHM_FOLDER) if "moeoffload-" in name}


def names_of(pid: int) -> set[str]:
    """What of the moeoffload server with this pid is in /dev/shm."""
    return {name for name in our_names() if f"moeoffload-{pid}-" in name}


def mode_of(name: str) -> int:
    return Path(SHM_FOLDER, name).stat().st_mode & 0o777
