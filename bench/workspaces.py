"""Whether steady state makes anything: steps of different shapes follow each other, and every pool must stand still.

``python bench/workspaces.py --json out.json``: rounds of one prefill, one decode step and one 4-row verify step. Both
sides count the frames, views, arenas and workspaces they make; after some rounds of warm-up there may be no more.
Beside it, how often one workspace for all shapes would be made again in the same steps: at each change of shape.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import psutil
import torch
import typer
from devices import CPU, HostDevice, ServerDevice, settle
from fleet import small_model
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, expert_server_process, machine, write_json
from transformers import DynamicCache

from moeoffload import OffloadedModel, open_model
from moeoffload.control.client import ControlClient

SHAPES = ("prefill", "decode", "verify")
VERIFY_ROWS = 4
WARM_UP = 64
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One kind of run. Counts are from after the warm-up to the end; times are those of one step in milliseconds."""

    transport: str
    prompts: str
    rounds: int
    host_made: int
    server_made: int
    one_workspace_would: int
    host_mib: float
    server_mib: float
    first_ms: dict[str, Spread]
    last_ms: dict[str, Spread]


class Run:
    """Rounds of steps of all shapes through one open model, which are counted from outside."""

    def __init__(self, offloaded: OffloadedModel, client: ControlClient, server: psutil.Process) -> None:
        self._offloaded = offloaded
        self._client = client
        self._server = server
        self.times: dict[str, list[float]] = {shape: [] for shape in SHAPES}
        self.n_rows: list[int] = []

    def round(self, prompt_rows: int) -> None:
        """One prefill, one decode step, one verify step, on a cache of their own."""
        device, cache = self._offloaded.model.device, DynamicCache(config=self._offloaded.model.config)
        for shape, rows in zip(SHAPES, (prompt_rows, 1, VERIFY_ROWS), strict=True):
            tokens = torch.full((1, rows), 5, device=device)
            started = perf_counter()
            self._offloaded.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            settle(device)
            self.times[shape].append((perf_counter() - started) * 1e3)
            self.n_rows.append(rows)

    def forget(self) -> None:
        """Forgets the steps so far."""
        self.n_rows.clear()
        for times in self.times.values():
            times.clear()

    def made(self) -> tuple[int, int]:
        """What was made so far, on the host and on the server."""
        return self._offloaded.pool_creations, sum(self._client.stats(10.0).pool_creations.values())

    def resident_mib(self) -> tuple[float, float]:
        """Resident memory of host and server."""
        return psutil.Process().memory_info().rss / MIB, self._server.memory_info().rss / MIB


def steady_state(run: Run, transport: str, varied: bool, prompt_rows: int, rounds: int) -> Row:
    """``rounds`` rounds after a warm-up. Varied prompts are of four lengths, as chunks of prompts are."""
    lengths = [prompt_rows - 64 * step for step in range(4)] if varied else [prompt_rows]
    for number in range(WARM_UP):
        run.round(lengths[number % len(lengths)])
    made, resident = run.made(), run.resident_mib()
    run.forget()
    for number in range(rounds):
        run.round(lengths[number % len(lengths)])
    tenth = max(1, rounds // 10)
    made_after, resident_after = run.made(), run.resident_mib()
    return Row(
        transport=transport,
        prompts=", ".join(map(str, lengths)),
        rounds=rounds,
        host_made=made_after[0] - made[0],
        server_made=made_after[1] - made[1],
        one_workspace_would=sum(before != after for before, after in pairwise(run.n_rows)),
        host_mib=resident_after[0] - resident[0],
        server_mib=resident_after[1] - resident[1],
        first_ms={shape: Spread.of_many(times[:tenth]) for shape, times in run.times.items()},
        last_ms={shape: Spread.of_many(times[-tenth:]) for shape, times in run.times.items()},
    )


def main(
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    quick: Annotated[bool, typer.Option(help="50 rounds.")] = False,
    rounds: int = 1000,
    prompt_rows: int = 320,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Count what is made after the warm-up, over both transports."""
    host_core, server_core = cores()
    rounds = 50 if quick else rounds
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        model = small_model(Path(stack.enter_context(tempfile.TemporaryDirectory())), experts=64, layers=2)
        process, address = stack.enter_context(
            expert_server_process(server_core, "--memory-gib", "1", device=server_device)
        )
        client = ControlClient(address)
        stack.callback(client.close)
        os.sched_setaffinity(0, {host_core})
        torch.set_num_threads(1)
        console = Console(width=None if Console().is_terminal else 150)
        console.print(f"{machine()['cpu']}, host on core {host_core}, server on core {server_core}")
        for transport in ("shared", "stream"):
            for varied in (False, True):
                with open_model(model, experts=[address], transport=transport, device=host_device) as offloaded:
                    run = Run(offloaded, client, psutil.Process(process.pid))
                    with torch.inference_mode():
                        rows.append(steady_state(run, transport, varied, prompt_rows, rounds))
    show(rows, console)
    if json is not None:
        settings: dict[str, Any] = {
            "quick": quick,
            "warm_up": WARM_UP,
            "verify_rows": VERIFY_ROWS,
            "host_core": host_core,
        }
        settings |= {"host_device": host_device, "server_device": server_device}
        write_json(json, "workspaces", settings, rows)
    if any(row.host_made or row.server_made for row in rows):
        raise typer.Exit(1)


def show(rows: list[Row], console: Console) -> None:
    """Prints the counts and the times of the first and the last tenth of the rounds."""
    table = Table(title=f"{rows[0].rounds:,} rounds of prefill, decode and {VERIFY_ROWS}-row verify; limit: 0 made")
    for column in ("transport", "prompt rows"):
        table.add_column(column)
    columns = ("made, host", "server", "one workspace", "host MiB", "server MiB", "decode ms, first", "last tenth")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.transport,
            row.prompts,
            f"{row.host_made:,}",
            f"{row.server_made:,}",
            f"{row.one_workspace_would:,}",
            f"{row.host_mib:+.1f}",
            f"{row.server_mib:+.1f}",
            f"{row.first_ms['decode']:.2f}",
            f"{row.last_ms['decode']:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
