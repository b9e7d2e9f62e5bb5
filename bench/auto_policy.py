"""Auto mode against the two fixed modes on three kinds of servers: prefill time, and what auto chose.

``python bench/auto_policy.py [--checkpoint DIR]``. The servers are real processes; "slow at large batches" takes 8
times as long for calls of more than 64 rows, "little memory" has room for few rows beside its experts. The limit is the
better of the two fixed modes in the same run.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from one_layer import OneLayer
from prefill_ipc import timed_generate
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, expert_server, machine, write_json

from moeoffload import open_model

MODES = ("batched", "stream", "auto")
SLOW = {"slow at large batches": ("above=64", "above_factor=8")}


@dataclass(frozen=True)
class Row:
    """One server kind and mode; seconds of prefill, and the ratio to the better fixed mode."""

    server: str
    mode: str
    prefill_s: Spread
    batch_capacity: int
    slice_rows: int
    ratio_to_best: float


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder; default: one layer is written")] = None,
    prompt_tokens: int = 1024,
    repeats: int = 5,
    hot_slice: int = 4,
    json: Path | None = None,
) -> None:
    """Measure batched, stream and auto on a fast server, one slow at large batches, and one with little memory."""
    host_core, server_core = cores()
    os.sched_setaffinity(0, {host_core})
    torch.set_num_threads(1)
    console = Console()
    console.print(f"{machine()['cpu']}, host on core {host_core}, server on core {server_core}")
    with contextlib.ExitStack() as stack:
        model = OneLayer.open(stack, checkpoint, experts=32, prompt_tokens=prompt_tokens)
        kinds = {
            "fast": (),
            "slow at large batches": (),
            "little memory": ("--memory-gib", f"{model.experts_gib + 0.02:.4f}"),
        }
        rows: list[Row] = []
        for kind, options in kinds.items():
            memory = () if "--memory-gib" in options else ("--memory-gib", f"{model.experts_gib + 2:.4f}")
            with expert_server(server_core, *memory, *options, slow=SLOW.get(kind, ())) as address:
                rows += measure(kind, model, address, repeats, hot_slice)
    table = Table(title=f"prefill of {prompt_tokens} tokens, medians of {repeats} (least-greatest)")
    for column in ("server", "mode", "prefill s", "cap", "slice", "to the better fixed mode"):
        table.add_column(column, justify="left" if column in ("server", "mode") else "right")
    for row in rows:
        cells = (f"{row.prefill_s:.3f}", str(row.batch_capacity), str(row.slice_rows), f"{row.ratio_to_best:.3f}")
        table.add_row(row.server, row.mode, *cells)
    console.print(table)
    if json is not None:
        write_json(json, "auto_policy", {"prompt_tokens": prompt_tokens, "hot_slice": hot_slice}, rows)


def measure(kind: str, model: OneLayer, address: str, repeats: int, hot_slice: int) -> list[Row]:
    """All modes on one server, one host after the other: a second one would halve the memory for batches."""
    spreads: dict[str, Spread] = {}
    caps: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for mode in MODES:
        with open_model(
            model.path, experts=[address], mode=mode, hot_slice=hot_slice, pipeline="off", device="cpu"
        ) as offloaded:
            seconds = [timed_generate(offloaded.model, model.prompt, 2)[0] for _ in range(repeats + 1)]
            server = offloaded.report().servers[0]
        spreads[mode] = Spread.of(seconds[1:])
        cap = caps[mode] = server["batch_capacity"]
        sizes[mode] = {"batched": cap, "stream": min(hot_slice, cap)}.get(mode) or server["auto"]["slice_rows"]
    best = min(spreads["batched"].median, spreads["stream"].median)
    return [Row(kind, mode, spreads[mode], caps[mode], sizes[mode], spreads[mode].median / best) for mode in MODES]


if __name__ == "__main__":
    typer.run(main)
