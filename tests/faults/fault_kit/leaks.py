"""What a process and the machine hold at the moment: descriptors, sockets, threads, segments, processes."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import psutil

from fault_kit.processes import wait_for

SHM: Final = Path("/dev/shm")
_OUR_SHM: Final = re.compile(r"(sem\.)?moeoffload-([0-9]+)-.*")
SPARE_THREADS: Final = 4
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
        spare = {"threads": SPARE_THREADS}
        now, then = asdict(self), asdict(before)
        return [
            f"{name} {then[name]} -> {now[name]}"
            for name in ("descriptors", "sockets", "threads", "segments")
            if now[name] > then[name] + spare.get(name, 0)
        ]


def shm_names() -> set[str]:
    """Segments and semaphores of ours that have a name in /dev/shm."""
    return {entry.name for entry in SHM.iterdir() if _OUR_SHM.fullmatch(entry.name)}


def shm_left(before: set[str], *pids: int) -> list[str]:
    """New names in /dev/shm of processes that are gone or among ``pids``: others may be of somebody else's run."""
    left = []
    for name in shm_names() - before:
        match = _OUR_SHM.fullmatch(name)
        if match and (int(match[2]) in pids or not psutil.pid_exists(int(match[2]))):
            left.append(name)
    return left


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
    try:
        wait_for(lambda: not leaks(), "leaks", timeout_s)
    except TimeoutError:
        return leaks()
    return []
