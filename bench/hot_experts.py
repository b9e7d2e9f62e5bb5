"""Experts that stay on the host: does a layer take no longer than its longer half, and are fewer bytes sent?

``python bench/hot_experts.py [--checkpoint DIR] [--json FILE]``. One layer of qwen3-30b-a3b's geometry, decode steps
and a prompt, with none, a part and all of the experts on the host. The limit of a layer's call is the longer of its two
parts, since they run at the same time: what the host computes, and the time to answer of the server.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from devices import CPU, HostDevice, ServerDevice, settle
from one_layer import OneLayer
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, expert_server, machine, write_json

from moeoffload import OffloadedModel, open_model

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
CALLS = {1: 200, 256: 12}
"""Calls for each number of rows."""


@dataclass(frozen=True)
class Row:
    """One share of the experts on the host and one kind of call; milliseconds, and bytes per call.

    ``remote_ms`` is what the call takes without the local part, ``limit_ms`` the longer of both parts.
    """

    local_share: float
    rows: int
    call_ms: Spread
    local_ms: float
    remote_ms: float
    limit_ms: float
    bytes_sent: float
    rows_sent: float


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder; default: one layer is written.")] = None,
    experts: int = 64,
    json: Path | None = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Measure calls of one row and of many with different shares of the experts on the host."""
    host_core, server_core = cores()
    console = Console()
    console.print(f"{machine()['cpu']}, host on core {host_core}, server on core {server_core}")
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        model = OneLayer.open(stack, checkpoint, experts=experts, prompt_tokens=8)
        address = stack.enter_context(expert_server(server_core, device=server_device))
        os.sched_setaffinity(0, {host_core})
        torch.set_num_threads(1)
        for share in SHARES:
            gib = share * model.experts_gib + 1e-6
            with open_model(
                model.path, experts=[address], local_experts_gib=gib, pipeline="off", device=host_device
            ) as offloaded:
                rows += [measure(offloaded, share, n_rows, n_calls) for n_rows, n_calls in CALLS.items()]
    table = Table(title="one layer: medians (5th-95th percentile)")
    for column in ("rows", "on the host", "call ms", "local ms", "remote ms", "limit ms", "rows sent", "KiB sent"):
        table.add_column(column, justify="right")
    for row in sorted(rows, key=lambda row: (row.rows, row.local_share)):
        table.add_row(
            str(row.rows),
            f"{row.local_share:.0%}",
            f"{row.call_ms:.2f}",
            f"{row.local_ms:.2f}",
            f"{row.remote_ms:.2f}",
            f"{row.limit_ms:.2f}",
            f"{row.rows_sent:.2f}",
            f"{row.bytes_sent / 1024:.1f}",
        )
    console.print(table)
    if json is not None:
        on = {"host_device": host_device, "server_device": server_device}
        write_json(json, "hot_experts", {"experts": experts, "calls": CALLS} | on, rows)


def measure(offloaded: OffloadedModel, share: float, n_rows: int, n_calls: int) -> Row:
    """Times calls of the dispatcher with random routes; then the same with one part left away at a time."""
    layer, top_k = offloaded.checkpoint.layers[0], offloaded.checkpoint.top_k
    generator, device = torch.manual_seed(n_rows), offloaded.model.device
    hidden = torch.randn(n_rows, offloaded.checkpoint.hidden_size, generator=generator).to(
        device, offloaded.checkpoint.dtype
    )
    weights = torch.full((n_rows, top_k), 1 / top_k, dtype=hidden.dtype, device=device)
    scores = [torch.rand(n_rows, layer.n_experts, generator=generator) for _ in range(n_calls)]
    routes = [each.topk(top_k).indices.to(device) for each in scores]
    times, local, remote, limits = [], [], [], []
    with torch.inference_mode():
        for ids in routes[:3]:
            offloaded.dispatcher(0, hidden, ids, weights)
        offloaded.recorder.reset()
        for ids in routes:
            counters = offloaded.recorder.counters
            counted = counters.layers[0]
            before = counted.local_s, sum(s.compute_s + s.queue_s for s in counters.servers), counted.pack_s
            started = perf_counter()
            offloaded.dispatcher(0, hidden, ids, weights)
            settle(device)
            times.append(1e3 * (perf_counter() - started))
            packed = counted.pack_s - before[2]
            local.append(1e3 * (counted.local_s - before[0] + packed))
            served = sum(s.compute_s + s.queue_s for s in counters.servers) - before[1]
            remote.append(1e3 * (served + packed))
            limits.append(max(local[-1], remote[-1]))
    server = offloaded.recorder.counters.servers
    return Row(
        share,
        n_rows,
        Spread.of_many(times),
        Spread.of(local).median,
        Spread.of(remote).median,
        Spread.of(limits).median,
        sum(each.bytes_out for each in server) / n_calls,
        sum(each.rows for each in server) / n_calls,
    )


if __name__ == "__main__":
    typer.run(main)
