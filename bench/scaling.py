"""Whether the cost of a call grows with the model: overhead against experts, layers, servers and prompt length.

``python bench/scaling.py --json out.json``: small random models (hidden 256, top-8), so that hardly anything but
overhead is left. Overhead is what the host spends in a call of the dispatcher without the time in which servers
compute (one after the other where they share a core), divided by the frames that the call sent. The limits beside it:
one copy of the frames' bytes, and a round trip over a bare semaphore, which is what it costs to wake another process
and be woken. Between two calls the host is busy for a while, as a dense layer keeps it, so that servers go to sleep
or not as they would in a model.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from devices import CPU, HostDevice, ServerDevice, settle
from fleet import TOP_K, Fleet, small_model
from rich.console import Console
from rich.table import Table
from round_trips import call_semaphore, measure, serve_semaphore, served
from servers import Spread, copy_bandwidth, cores, machine, write_json

from moeoffload import OffloadedModel, open_model
from moeoffload.host.recorder import CallCounters

FLAT = 1.2
PROMPT_FRAME_ROWS = 64


@dataclass(frozen=True)
class Point:
    """One model and one kind of call. Few rows go out as one frame for each server."""

    experts: int = 64
    layers: int = 4
    servers: int = 1
    rows: int = 1


SWEEPS: dict[str, tuple[int, ...]] = {
    "experts": (8, 32, 128, 512),
    "layers": (1, 4, 16),
    "servers": (1, 2, 4, 8),
    "rows": (64, 256, 1024, 4096, 16384),
}
QUICK: dict[str, tuple[int, ...]] = {"experts": (8, 64), "layers": (1, 4), "servers": (1, 2), "rows": (64, 1024)}


@dataclass(frozen=True)
class Row:
    """One point. ``overhead_us`` is for one layer and frame; ``verdict`` belongs to the whole sweep."""

    sweep: str
    transport: str
    value: int
    frames: float
    overhead_us: Spread
    compute_us: float
    copy_limit_us: float
    verdict: str = ""


def points(sweep: str, values: tuple[int, ...]) -> Iterator[tuple[int, Point]]:
    for value in values:
        yield value, replace(Point(), **{sweep: value})


def expert_ids(offloaded: OffloadedModel, layer: int, n_rows: int) -> torch.Tensor:
    """Top-k ids that ask every server for the same number of experts; each row asks for others."""
    ids = torch.empty(n_rows, TOP_K, dtype=torch.int64)
    links = offloaded.links
    for choice in range(TOP_K):
        held = torch.tensor(links[choice % len(links)].table.layers[layer])
        ids[:, choice] = held[(torch.arange(n_rows) + choice // len(links)) % len(held)]
    return ids


def busy(seconds: float) -> None:
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def overheads(
    offloaded: OffloadedModel, rows: int, budget_s: float, gap_s: float, n_cores: int
) -> tuple[list[float], CallCounters]:
    """Overhead per frame of every call in seconds, and what the servers counted over all these calls."""
    layers, device = range(len(offloaded.checkpoint.layers)), offloaded.model.device
    hidden = torch.randn(rows, offloaded.checkpoint.hidden_size, dtype=offloaded.checkpoint.dtype, device=device)
    weights = torch.full((rows, TOP_K), 1 / TOP_K, dtype=hidden.dtype, device=device)
    ids = [expert_ids(offloaded, layer, rows).to(device) for layer in layers]
    times: list[float] = []

    def passes(at_least: int, seconds: float) -> None:
        end = perf_counter() + seconds
        times.clear()
        while len(times) < at_least * len(layers) or perf_counter() < end:
            for layer in layers:
                busy(gap_s)
                counters = offloaded.recorder.counters
                waited_s, sent = counters.layers[layer].wait_compute_s, sum(server.calls for server in counters.servers)
                computed = [server.compute_s for server in counters.servers]
                started = perf_counter()
                offloaded.dispatcher(layer, hidden, ids[layer], weights)
                settle(device)
                wall_s = perf_counter() - started
                sent = sum(server.calls for server in counters.servers) - sent
                # Servers that share a core compute one after the other, whoever the host waits for first.
                took = [server.compute_s - before for server, before in zip(counters.servers, computed, strict=True)]
                busiest_s = min(wall_s, max(sum(took[core::n_cores]) for core in range(n_cores)))
                times.append((wall_s - max(busiest_s, counters.layers[layer].wait_compute_s - waited_s)) / sent)

    # The first passes make buffers and views.
    passes(3, 0.0)
    offloaded.recorder.reset()
    passes(5, budget_s)
    total = CallCounters()
    for server in offloaded.recorder.counters.servers:
        total.calls += server.calls
        total.bytes_out += server.bytes_out
        total.bytes_back += server.bytes_back
        total.compute_s += server.compute_s
    return times, total


def verdict(medians: list[float]) -> str:
    """Flat if no point is more than 20 % above the least one; falls if none is more than 20 % above an earlier one."""
    spread = max(medians) / min(medians)
    if spread <= FLAT:
        return f"flat (greatest / least {spread:.2f})"
    if all(later <= FLAT * min(medians[:at]) for at, later in enumerate(medians) if at):
        return f"falls, x {medians[-1] / medians[0]:.2f}"
    if medians[-1] > FLAT * medians[0]:
        return f"grows, x {medians[-1] / medians[0]:.2f}"
    return f"uneven (greatest / least {spread:.2f})"


def main(
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    quick: Annotated[bool, typer.Option(help="Two points of each sweep.")] = False,
    seconds: Annotated[float, typer.Option(help="Time for each point.")] = 3.0,
    gap_us: Annotated[float, typer.Option(help="How long the host is busy between two calls.")] = 500.0,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Measure every sweep over both transports."""
    sweeps, seconds = (QUICK, 0.5) if quick else (SWEEPS, seconds)
    host_core, server_core = cores()
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = Fleet(stack, "--memory-gib", "1", device=server_device)
        with served(serve_semaphore, server_core) as names, call_semaphore(names) as call:
            os.sched_setaffinity(0, {host_core})
            semaphore_us, _ = measure(call, 0, 0.5)
        torch.set_num_threads(1)
        bandwidth = copy_bandwidth()
        console = Console(width=None if Console().is_terminal else 150)
        console.print(f"{machine()['cpu']}, host on core {host_core}, servers on {fleet.n_cores} other core(s)")
        for transport in ("shared", "stream"):
            for sweep, values in sweeps.items():
                found = []
                for value, point in points(sweep, values):
                    path = small_model(folder, experts=point.experts, layers=point.layers)
                    with open_model(
                        path,
                        experts=fleet.addresses(point.servers),
                        transport=transport,
                        batch_capacity=PROMPT_FRAME_ROWS,
                        mode="batched",
                        pipeline="off",
                        device=host_device,
                    ) as offloaded:
                        times, total = overheads(offloaded, point.rows, seconds, gap_us * 1e-6, fleet.n_cores)
                    row = Row(
                        sweep=sweep,
                        transport=transport,
                        value=value,
                        frames=total.calls / len(times),
                        overhead_us=Spread.of_many([time * 1e6 for time in times]),
                        compute_us=1e6 * total.compute_s / total.calls,
                        copy_limit_us=1e6 * (total.bytes_out + total.bytes_back) / bandwidth / total.calls,
                    )
                    found.append(row)
                said = verdict([row.overhead_us.median for row in found])
                rows += [replace(row, verdict=said) for row in found]
                console.print(f"  {transport}, {sweep}: {said}", style="dim")
    show(rows, semaphore_us, console)
    if json is not None:
        settings = {
            "quick": quick,
            "hidden": 256,
            "top_k": TOP_K,
            "gap_us": gap_us,
            "frame_rows": PROMPT_FRAME_ROWS,
            "host_core": host_core,
            "server_cores": fleet.n_cores,
            "semaphore_us": semaphore_us,
            "copy_bytes_per_s": bandwidth,
            "host_device": host_device,
            "server_device": server_device,
        }
        write_json(json, "scaling", settings, rows)


def show(rows: list[Row], semaphore_us: float, console: Console) -> None:
    title = f"overhead per layer and frame: medians (5th-95th percentile); bare semaphore {semaphore_us:.0f} us"
    table = Table(title=title)
    left = ("transport", "against", "verdict")
    for column in (*left[:2], "", "frames / call", "overhead us", "compute us", "copy limit us", left[2]):
        table.add_column(column, justify="left" if column in left else "right")
    for number, row in enumerate(rows):
        following = rows[number + 1 : number + 2]
        last = not following or following[0].sweep != row.sweep
        table.add_row(
            row.transport,
            row.sweep,
            f"{row.value:,}",
            f"{row.frames:.0f}",
            f"{row.overhead_us:,.0f}",
            f"{row.compute_us:,.0f}",
            f"{row.copy_limit_us:,.1f}",
            row.verdict if last else "",
            end_section=last,
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
