"""Two servers, one slowed down: is each busy for the same time, and does the slow one help rather than harm?

``python bench/balance.py [--checkpoint DIR] [--factor 4]``. The limit is perfect balance: every server busy for the
mean, and never slower than without the slow one.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from prefill_ipc import timed_generate
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, expert_server, machine, write_json

from moeoffload import open_model
from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.synthetic import geometry_config, write_checkpoint


@dataclass(frozen=True)
class Row:
    """One set of servers; busy is the greatest busy time of a server over the mean."""

    servers: str
    prefill_s: Spread
    decode_tokens_per_s: Spread
    experts: list[int]
    busy_s: list[float]
    busiest_to_mean: float


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder; default: one layer is written")] = None,
    factor: float = 4.0,
    prompt_tokens: int = 512,
    completion: int = 64,
    repeats: int = 5,
    json: Path | None = None,
) -> None:
    """Measure the fast server alone, and with one that takes ``factor`` times as long."""
    host_core, server_core = cores()
    os.sched_setaffinity(0, {host_core})
    torch.set_num_threads(1)
    console = Console()
    console.print(f"{machine()['cpu']}, host on core {host_core}, servers on core {server_core}")
    with contextlib.ExitStack() as stack:
        if checkpoint is None:
            checkpoint = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "one-layer"
            write_checkpoint(geometry_config("qwen3-30b-a3b", layers=1, experts=64), checkpoint)
        about = Checkpoint.open(checkpoint)
        gib = sum(layer.n_experts * layer.expert_bytes for layer in about.layers) / (1 << 30)
        memory = ("--memory-gib", f"{gib + 1:.3f}")
        fast = stack.enter_context(expert_server(server_core, *memory))
        slow = stack.enter_context(expert_server(server_core, *memory, "--simulate", f"factor={factor}"))
        prompt = torch.randint(5, about.config.get_text_config().vocab_size, (1, prompt_tokens))
        sets = {"fast alone": [fast], f"fast + {factor:g} x slower": [fast, slow]}
        opened = {
            name: stack.enter_context(open_model(str(checkpoint), experts=addresses, pipeline="off", device="cpu"))
            for name, addresses in sets.items()
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sets}
        for repeat in range(repeats + 1):
            for name, offloaded in opened.items():
                if repeat == 1:
                    offloaded.recorder.reset()
                timing = timed_generate(offloaded.model, prompt, completion)
                if repeat:
                    times[name].append(timing)
        rows = [row(name, times[name], opened[name].report().servers) for name in sets]
    table = Table(title=f"prompt {prompt_tokens}, completion {completion}, medians of {repeats} (least-greatest)")
    for column in ("servers", "experts", "prefill s", "decode tok/s", "busy s", "busiest / mean"):
        table.add_column(column, justify="left" if column == "servers" else "right")
    for each in rows:
        table.add_row(
            each.servers,
            " + ".join(map(str, each.experts)),
            f"{each.prefill_s:.3f}",
            f"{each.decode_tokens_per_s:.1f}",
            " + ".join(f"{seconds:.2f}" for seconds in each.busy_s),
            f"{each.busiest_to_mean:.2f}",
        )
    console.print(table)
    if json is not None:
        write_json(json, "balance", {"factor": factor, "prompt": prompt_tokens, "completion": completion}, rows)


def row(name: str, times: list[tuple[float, float]], servers: list[dict[str, Any]]) -> Row:
    busy = [sum(phase["compute_s"] for phase in server["phases"].values()) for server in servers]
    return Row(
        name,
        Spread.of([prefill for prefill, _ in times]),
        Spread.of([decode for _, decode in times]),
        [server["n_experts"] for server in servers],
        busy,
        max(busy) * len(busy) / sum(busy),
    )


if __name__ == "__main__":
    typer.run(main)
