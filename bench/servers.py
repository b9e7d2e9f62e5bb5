"""What benchmarks share: expert servers pinned to a core, the machine's description, medians."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from devices import CPU

from moeoffload.devices import device_name


@dataclass(frozen=True)
class Spread:
    """Median of several measurements, and the range they are in."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The range is from the least to the greatest."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_many(cls, values: Sequence[float]) -> Spread:
        """The range is from the 5th to the 95th percentile, since among many there are always some strange ones."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20])

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} [{self.low:{spec}}-{self.high:{spec}}]"


def cores() -> tuple[int, int]:
    """The host's core and the server's; the same one if there is no second."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[1 % len(usable)]


@contextmanager
def expert_server(core: int, *options: str, device: str = CPU, slow: Sequence[str] = ()) -> Iterator[str]:
    """A ``moeoffload-expert`` process pinned to ``core``; yields its address. ``slow``: see `slow_server`."""
    with expert_server_process(core, *options, device=device, slow=slow) as (_, address):
        yield address


@contextmanager
def expert_server_process(
    core: int, *options: str, device: str = CPU, slow: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """As `expert_server`; yields the process, too."""
    app = (
        (str(Path(__file__).with_name("slow_server.py")), *slow, "--") if slow else ("-m", "moeoffload.cli.expert_app")
    )
    command = [sys.executable, *app, "--listen", "127.0.0.1:0", "--exit-with-stdin"]
    command += ["--device", device, "--threads", "1", "--log-level", "warning", *options]
    process = subprocess.Popen(
        ["taskset", "-c", str(core), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = re.search(r"ready on (\S+)", process.stdout.readline())
        if ready is None:
            raise SystemExit("the expert server did not start")
        yield process, ready.group(1)
    finally:
        process.terminate()
        process.wait(timeout=30)


def machine() -> dict[str, Any]:
    """What a figure was measured on."""
    return {
        "cpu": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def copy_bandwidth() -> float:
    """Bytes per second that one core copies (bytes written)."""
    from time import perf_counter

    source = torch.ones(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = []
    for _ in range(7):
        started = perf_counter()
        target.copy_(source)
        times.append(perf_counter() - started)
    return source.numel() / statistics.median(times)


def write_json(path: Path, benchmark: str, settings: dict[str, Any], rows: Sequence[Any]) -> None:
    """Writes the result of a benchmark with the machine it ran on."""
    data = {
        "benchmark": benchmark,
        "machine": machine(),
        "settings": settings,
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(data, indent=2) + "\n")
