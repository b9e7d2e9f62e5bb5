"""This checkout against another one, in turns: ``python bench/against.py OTHER_CHECKOUT --checkpoint DIR --json F``.

Decode and prefill over both transports, and served requests; host on one core, its expert server on another. The
limit of a ratio is the noise of the machine, which the spread over turns shows.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from devices import CPU, HostDevice, ServerDevice
from duel import Opponent, Result, duel
from local_model import benchmark_checkpoint
from rich.console import Console
from rich.table import Table
from servers import Spread, machine, write_json

ROOT = Path(__file__).resolve().parents[1]
DIRECT: tuple[dict[str, Any], ...] = (
    {"task": "decode", "prompt": 64, "tokens": 16},
    {"task": "prefill", "prompt": 512},
    {"task": "prefill", "prompt": 2048},
)
SERVED: tuple[dict[str, Any], ...] = (
    {"task": "serve", "requests": 1, "tokens": 16},
    {"task": "serve", "requests": 8, "tokens": 16},
)
WAYS: dict[str, dict[str, Any]] = {
    "shared": {"settings": {"transport": "shared"}},
    "stream": {"settings": {"transport": "stream"}},
    "served": {"served": True},
}


@dataclass(frozen=True)
class Row:
    """Seconds of this checkout and of the other one, and speed of this one over the other's, turn by turn."""

    way: str
    task: str
    this_s: Spread
    other_s: Spread
    speed: Spread
    turns: list[float]

    @classmethod
    def of(cls, way: str, result: Result) -> Row:
        return cls(way, result.task, result.first_s, result.second_s, result.ratio, result.turns)


def main(
    other: Annotated[Path, typer.Argument(help="Another checkout, its kernels built.")],
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder; default: one is written.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    ways: str = ",".join(WAYS),
    turns: int = 5,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Compare two checkouts on the same tasks."""
    console = Console(width=130)
    on = {"host_device": host_device, "server_device": server_device}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint or benchmark_checkpoint(Path(folder) / "model")
        for way in ways.split(","):
            options = WAYS[way] | on
            this, that = (partial(Opponent, model, options, tree) for tree in (ROOT, other.resolve()))
            results = duel(this, that, SERVED if way == "served" else DIRECT, turns)
            rows += [Row.of(way, result) for result in results]
            console.print(f"  {way} done", style="dim")
    table = Table(title=f"{machine()['cpu']}; speed of this checkout over the other's, turn by turn (least-greatest)")
    for column in ("way", "task", "this s", "other s", "speed"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.way, row.task, f"{row.this_s:.3f}", f"{row.other_s:.3f}", f"{row.speed:.3f}")
    console.print(table)
    if json is not None:
        write_json(json, "against", {"turns": turns} | on, rows)


if __name__ == "__main__":
    typer.run(main)
