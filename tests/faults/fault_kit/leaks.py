"""What a process and the machine hold at the moment: descriptors, sockets, threads, segments, processes."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from server_processes import wait_until

SPARE: Final = {"descriptors": 0, "sockets": 0, "threads": 4, "segments": 0}
"""gRPC and its pools start and end threads as they like, up to a few; what leaks grows past this."""


@dataclass(frozen=True)
class Holding:
    """What one process holds."""

    descriptors: int
    sockets: int
    threads: int
    segments: int
    """Mappings of shared memory and semaphores of ours, also those whose name is gone."""
    resident_mib: float

    @classmethod
    def of(cls, pid: int) -> Holding:
        """Counts now; in this process garbage is collected first."""
        if pid == os.getpid():
            gc.collect()
        process = psutil.Process(pid)
        maps = Path(f"/proc/{pid}/maps").read_text()
        return cls(
            descriptors=process.num_fds(),
            sockets=len(process.net_connections("tcp")),
            threads=process.num_threads(),
            segments=maps.count("moeoffload-"),
            resident_mib=process.memory_info().rss / (1 << 20),
        )

    def beyond(self, before: Holding) -> list[str]:
        """What is more than it was before, in words; memory is looked at over time, by the soak, not here."""
        pairs = {name: (getattr(before, name), getattr(self, name)) for name in SPARE}
        return [f"{name} {then} -> {now}" for name, (then, now) in pairs.items() if now > then + SPARE[name]]


def descendants() -> set[int]:
    """Processes below this one that run."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


def settled(leaks: Callable[[], list[str]], timeout_s: float) -> list[str]:
    """Looks until there are no leaks or ``timeout_s`` seconds are over: what is being freed is not lost."""
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not leaks(), "leaks", timeout_s)
    return leaks()
