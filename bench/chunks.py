"""How long the chunks of a pipelined prompt should be: prompts of several lengths, cut in several ways.

``python bench/chunks.py --checkpoint DIR [--json FILE]``: the baseline is the same prompt with all experts in the
host's own process. The limit is perfect overlap: what a local run takes over the longer of
its two parts, outside and inside the experts.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from devices import CPU, HostDevice, ServerDevice
from local_model import load_local
from phases import watch_local
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, expert_server, machine, write_json
from turns import Contender, prefill, ratio, take_turns

from moeoffload import open_model

CHUNKS = {512: (128, 192, 256), 1024: (128, 256, 384, 512), 2048: (256, 384, 512, 1024), 4248: (256, 576, 768, 1088)}


@dataclass(frozen=True)
class Row:
    """A prompt cut in one way; ``chosen`` is what the pipeline does by itself. Speed is relative to the local run."""

    tokens: int
    chunk_rows: int
    chosen: bool
    seconds: Spread
    times_local_speed: Spread
    limit: float


def main(
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint folder")],
    repeats: int = 5,
    longest: Annotated[int, typer.Option(help="Leave longer prompts out.")] = 4248,
    json: Path | None = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Measure every way to cut every prompt, in turns with the local model."""
    host_core, server_core = cores()
    os.sched_setaffinity(0, {host_core})
    torch.set_num_threads(1)
    console = Console()
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(expert_server(server_core, device=server_device))
        local = Contender(load_local(checkpoint, host_device))
        offloaded = stack.enter_context(
            open_model(checkpoint, experts=[address], transport="shared", device=host_device)
        )
        remote = Contender(offloaded.model, offloaded, "shared", "on")
        experts = [layer.module_name for layer in offloaded.checkpoint.layers]
        chunk_rows_for = offloaded.pipeline.chunk_rows_for
        vocab = local.model.config.get_text_config().vocab_size
        for tokens, sizes in CHUNKS.items():
            if tokens > longest:
                continue
            prompt = torch.randint(5, vocab, (1, tokens), generator=torch.manual_seed(tokens))
            chosen_rows = chunk_rows_for(tokens)
            parts = watch_local(local, functools.partial(prefill, prompt=prompt), experts, 1)
            seen = [seconds for seconds in parts.values() if seconds]

            def task(way: tuple[Contender, int], prompt: torch.Tensor = prompt) -> float:
                contender, rows_each = way
                offloaded.pipeline.chunk_rows_for = lambda _: rows_each
                return prefill(contender, prompt)

            ways = [(local, 0), *((remote, size) for size in sizes)]
            times = take_turns(ways, task, repeats)
            for (_, size), mine in zip(ways[1:], times[1:], strict=True):
                chosen = chosen_rows == size
                speed = ratio(times[0], mine)
                rows.append(Row(tokens, size, chosen, Spread.of(mine), speed, sum(seen) / max(seen)))
            console.print(f"  prompt of {tokens} tokens done", style="dim")
    place = f"{machine()['cpu']}, host on core {host_core}, server on core {server_core}"
    table = Table(title=f"{place}; median of {repeats}")
    for column in ("tokens", "rows of a chunk", "seconds", "x local speed", "limit"):
        table.add_column(column, justify="right")
    for row in rows:
        length = f"{row.chunk_rows} *" if row.chosen else f"{row.chunk_rows}  "
        table.add_row(
            f"{row.tokens:,}", length, f"{row.seconds:.3f}", f"{row.times_local_speed:.2f}", f"{row.limit:.2f}"
        )
    console.print(table, "* what the pipeline does by itself")
    if json is not None:
        on = {"host_device": host_device, "server_device": server_device}
        write_json(json, "chunks", {"checkpoint": checkpoint.name, "repeats": repeats} | on, rows)


if __name__ == "__main__":
    typer.run(main)
