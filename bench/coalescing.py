"""Several hosts that decode on one expert server: what it brings to compute their requests together.

``python bench/coalescing.py --checkpoint DIR --json out.json``. Every client is a lease with a channel of its own and
sends one row after the other to one layer, as a host does that decodes; two servers on the same core, one that puts
together what waits for the same experts and one that does not, take turns. The limit is the bytes of the experts that
random routes hit, each read once for all rows that wait together, over the bandwidth of one reading core.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from devices import CPU, ServerDevice
from fairness import TIMEOUT_S, RawHost
from limits import read_bandwidth
from one_layer import OneLayer
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, expert_server_process, machine, write_json

from moeoffload.checkpoint import Checkpoint
from moeoffload.control.client import ControlClient

ROUTES = 64
"""Different rows of each client, sent in turns."""


@dataclass(frozen=True)
class Row:
    """One number of clients on one kind of server; ``members``: kernel calls with 1, 2, 3, 4, 5-8 and 9+ requests."""

    clients: int
    coalesce: bool
    rows_per_s: Spread
    limit: float
    p50_ms: float
    p95_ms: float
    mean_members: float
    members: list[int]


class Server:
    """An expert server with its clients."""

    def __init__(
        self, stack: contextlib.ExitStack, core: int, device: str, path: Path, n_clients: int, coalesce: bool
    ) -> None:
        flag = "--coalesce" if coalesce else "--no-coalesce"
        _, address = stack.enter_context(expert_server_process(core, flag, device=device))
        self.hosts = [RawHost(address, path, "shared", capacity=32, slots=1) for _ in range(n_clients)]
        for host in self.hosts:
            stack.callback(host.close)
        self._control = ControlClient(address)
        self._control.connect(TIMEOUT_S)
        stack.callback(self._control.close)

    def members(self) -> list[int]:
        """Kernel calls so far by their number of requests."""
        return list(self._control.stats(TIMEOUT_S).batches.by_members)

    def run(self, n_clients: int, seconds: float) -> list[float]:
        """The milliseconds of all calls of so many clients, which work side by side."""
        times: list[list[float]] = [[] for _ in range(n_clients)]
        begin = threading.Barrier(n_clients)

        def work(number: int) -> None:
            host = self.hosts[number]
            slot = host.channel.acquire(TIMEOUT_S)
            begin.wait(TIMEOUT_S)
            until = perf_counter() + seconds
            while (started := perf_counter()) < until:
                host.fill(slot, 1, number * ROUTES + len(times[number]) % ROUTES)
                started = perf_counter()
                host.send(slot, 1)
                host.receive(slot)
                times[number].append((perf_counter() - started) * 1e3)
            host.channel.release(slot)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(n_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [each for mine in times for each in mine]


def measure(servers: dict[bool, Server], n_clients: int, repeats: int, seconds: float, limit: float) -> list[Row]:
    speeds: dict[bool, list[float]] = {kind: [] for kind in servers}
    times: dict[bool, list[float]] = {kind: [] for kind in servers}
    before = {kind: server.members() for kind, server in servers.items()}
    for _ in range(repeats):
        for kind, server in servers.items():
            took = server.run(n_clients, seconds)
            speeds[kind].append(len(took) / seconds)
            times[kind] += took
    rows = []
    for kind, server in servers.items():
        members = [now - then for now, then in zip(server.members(), before[kind], strict=True)]
        cuts = statistics.quantiles(times[kind], n=20)
        mean = len(times[kind]) / max(1, sum(members))
        speed = Spread.of(speeds[kind])
        rows.append(Row(n_clients, kind, speed, limit, cuts[9], cuts[18], mean, members))
    return rows


def table(rows: Sequence[Row]) -> Table:
    made = Table(title="one row at a time from each client, one layer")
    for name in (
        "clients",
        "together",
        "rows/s",
        "limit",
        "p50 ms",
        "p95 ms",
        "members",
        "calls of 1, 2, 3, 4, 5-8, 9+",
    ):
        made.add_column(name, justify="right")
    for row in rows:
        made.add_row(
            str(row.clients),
            "yes" if row.coalesce else "no",
            f"{row.rows_per_s:.0f}",
            f"{row.limit:.0f}",
            f"{row.p50_ms:.2f}",
            f"{row.p95_ms:.2f}",
            f"{row.mean_members:.2f}",
            " ".join(map(str, row.members)),
        )
    return made


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder; default: one layer is written.")] = None,
    clients: Annotated[str, typer.Option(help="Numbers of clients.")] = "1,2,4,8",
    seconds: Annotated[float, typer.Option(help="Length of a turn.")] = 1.0,
    repeats: int = 5,
    json: Path | None = None,
    server_device: ServerDevice = CPU,
) -> None:
    """Measure decoding clients with and without coalescing."""
    host_core, server_core = cores()
    counts = [int(part) for part in clients.split(",")]
    console = Console(width=None if Console().is_terminal else 140)
    console.print(f"{machine()['cpu']}, clients on core {host_core}, servers on core {server_core}")
    with contextlib.ExitStack() as stack:
        path = OneLayer.open(stack, checkpoint, experts=64, prompt_tokens=8).path
        servers = {kind: Server(stack, server_core, server_device, path, max(counts), kind) for kind in (False, True)}
        os.sched_setaffinity(0, {host_core})
        torch.set_num_threads(1)
        about = Checkpoint.open(path)
        layer, bandwidth = about.layers[0], read_bandwidth(server_device)
        rows: list[Row] = []
        for n in counts:
            hit = layer.n_experts * (1 - (1 - about.top_k / layer.n_experts) ** n)
            rows += measure(servers, n, repeats, seconds, n * bandwidth / (hit * layer.expert_bytes))
    console.print(table(rows))
    if json is not None:
        settings = {"checkpoint": path.name, "seconds": seconds, "repeats": repeats, "server_device": server_device}
        write_json(json, "coalescing", settings, rows)


if __name__ == "__main__":
    typer.run(main)
