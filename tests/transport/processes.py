"""Real processes that hold one end of a shared-memory channel, to be killed at any moment."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moeoffload.transport import ChannelOffer, SharedServerEnd, open_channel
from moeoffload.transport.segment import SHM_FOLDER

from .ends import SIZES, SOON_S, call, echo, send

# Forks of a process that has imported this, and has no threads: real processes without seconds of import each.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["moeoffload.transport"])


class Process:
    """A process that runs ``body(pipe)`` and then waits to be killed."""

    def __init__(self, body: Callable[[Connection], None]) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=body, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def hears(self) -> Any:
        """What the process says next."""
        assert self.pipe.poll(SOON_S * 3), "the process says nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(SOON_S)
        self._process.close()
        self.pipe.close()


def serve_once(pipe: Connection) -> None:
    """Creates a channel, says its offer, serves until told that the host has opened it, and after."""
    server = SharedServerEnd(SIZES, echo)
    pipe.send((server.offer, server.nonce))
    pipe.recv()
    server.opened()
    pipe.send("opened")
    pipe.recv()


def serve_never(pipe: Connection) -> None:
    """As `serve_once`, but takes requests without answering them; says when it has one."""
    server = SharedServerEnd(SIZES, lambda channel, slot: pipe.send("request"))
    pipe.send((server.offer, server.nonce))
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
