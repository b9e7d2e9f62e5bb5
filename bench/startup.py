"""How long the commands take to start: ``python bench/startup.py --json FILE``.

Each round starts all of them once, one after the other; a ratio is that to ``import torch`` in the same round. What a
command cannot do without is its limit: a bare Python, torch, or for a host the demo model's class of transformers, each
the best of all rounds. One host starts its server itself; of the others the first asks a server that just said that it
is ready, and the second finds the experts there. All run the demo model on the CPU, with a thread each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from devices import CPU, HostDevice, ServerDevice
from rich.console import Console
from rich.table import Table
from servers import Spread, write_json

DEMO = Path(__file__).parents[1] / "examples" / "demo" / "checkpoint"
TIMEOUT_S = 60
LIMITS = {
    "server ready": 2.0,
    "first token, no server": 4.5,
    "first token, first host": 3.0,
    "first token, warm server": 3.0,
}
TORCH = "import torch"
MODEL = "from transformers import Qwen3MoeForCausalLM"


@dataclass(frozen=True)
class Row:
    """One command; ``bound_s`` is what it may take on a quiet machine, ``limit_s`` what cannot be less."""

    command: str
    seconds: Spread
    times_torch: Spread
    limit_s: float
    bound_s: float | None


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def console_script(name: str, *arguments: str) -> list[str]:
    """What pip makes of an entry point, of this working tree."""
    return python("-c", f"from moeoffload.cli.entry import {name}; {name}()", *arguments)


def seconds_of(command: list[str]) -> float:
    """From the start of a command to its end."""
    begun = perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
    return perf_counter() - begun


@contextmanager
def started(command: list[str]) -> Iterator[tuple[float, str]]:
    """The seconds until a command has written its first line, and the line; it is ended afterwards."""
    begun = perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = perf_counter() - begun
        if not line:
            raise SystemExit(f"{command} did not start")
        yield seconds, line
    finally:
        process.terminate()
        process.wait(timeout=TIMEOUT_S)


def first_token(device: str, *servers: str) -> float:
    """Seconds until `moeoffload run` shows the first character of an answer; ``servers`` are options."""
    arguments = ("run", str(DEMO), *servers, "--device", device, "--threads", "1", "--prompt", "add 17 25 =")
    begun = perf_counter()
    command = console_script("moeoffload", *arguments)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        seconds = perf_counter() - begun
        if process.stdout.read().strip() != b"42":
            raise SystemExit("the demo model did not answer")
    return seconds


def one_round(host_device: str, server_device: str) -> dict[str, float]:
    """Seconds of every command, by what they were started for."""
    times = {"python": seconds_of(python("-c", "pass")), TORCH: seconds_of(python("-c", TORCH))}
    times[MODEL] = seconds_of(python("-c", MODEL))
    times["moeoffload --help"] = seconds_of(console_script("moeoffload", "--help"))
    times["first token, no server"] = first_token(host_device, "--server-memory-gib", "1")
    server = ["--listen", "127.0.0.1:0", "--device", server_device, "--threads", "1", "--memory-gib", "1"]
    server += ["--keep-warm", "on"]
    with started(console_script("moeoffload_expert", *server)) as (times["server ready"], line):
        address = line.split(" on ")[1].split()[0]
        times["first token, first host"] = first_token(host_device, "--experts", address)
        times["first token, warm server"] = first_token(host_device, "--experts", address)
        serve = ("serve", str(DEMO), "--experts", address, "--port", "0", "--device", host_device, "--threads", "1")
        with started(console_script("moeoffload", *serve)) as (times["serve ready"], _):
            pass
    return times


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the result goes.")] = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Measure what a user waits for."""
    one_round(host_device, server_device)  # files come into the page cache, byte code is written
    times = [one_round(host_device, server_device) for _ in range(rounds)]
    least = {name: min(each[name] for each in times) for name in ("python", TORCH, MODEL)}
    needs = dict.fromkeys(("python", TORCH, "moeoffload --help"), "python") | {"server ready": TORCH}
    rows = [
        Row(
            name,
            Spread.of([each[name] for each in times]),
            Spread.of([each[name] / each[TORCH] for each in times]),
            least[needs.get(name, MODEL)],
            LIMITS.get(name),
        )
        for name in times[0]
    ]
    table = Table(title=f"seconds, median of {rounds} rounds")
    for column in ("command", "s", f"times {TORCH}", "limit s", "bound s"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for row in rows:
        bound = "–" if row.bound_s is None else f"{row.bound_s:g}"
        table.add_row(row.command, f"{row.seconds:.2f}", f"{row.times_torch:.2f}", f"{row.limit_s:.2f}", bound)
    Console().print(table)
    if json is not None:
        write_json(
            json, "startup", {"rounds": rounds, "host_device": host_device, "server_device": server_device}, rows
        )


if __name__ == "__main__":
    typer.run(main)
