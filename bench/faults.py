"""Faults of all kinds over generation, drawn from a seed: what each cost, and whether anything was lost or left.

``python bench/faults.py --n 200 --seed 1 --json out.json``: two servers behind TCP proxies (loopback addresses
127.0.0.1 and 127.0.0.2), a host that keeps the demo model open; one generation per fault, another one when the fault is
over. Every kind of fault comes equally often over shared memory and TCP, with every expert on both servers (replica)
and with each on one (fallback). Exit code 1 if a token differs, a pause is longer than the deadline of a dispatch and a
fifth, a server is not used again within 10 s, or anything is left.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import fault_path  # noqa: F401  (before what it makes importable)
import typer
from devices import CPU, HostDevice, ServerDevice
from fault_kit.outcome import Outcome
from fault_kit.schedule import SETUPS, Fault, draw_faults
from fault_kit.world import DEADLINE_S, FLOOR_S, SPARE, WHOLE_TIMEOUT_S, World
from fault_results import KindRow, kind_rows, summary, write_results
from rich.console import Console
from rich.table import Table


def run_faults(
    faults: list[Fault], console: Console, host_device: str, server_device: str
) -> tuple[list[Outcome], dict[str, list[str]]]:
    """The outcomes, and what was left after the model was closed in each setup."""
    outcomes: list[Outcome] = []
    closing: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for setup in SETUPS:
            chosen = [fault for fault in faults if fault.setup == setup]
            while chosen:
                # A world in which something is broken for good is no place for the next fault.
                with World(Path(tempfile.mkdtemp(dir=folder)), "--device", server_device) as world:
                    world.open(setup, device=host_device)
                    healthy = True
                    while chosen and healthy:
                        outcome = world.run(chosen.pop(0))
                        outcomes.append(outcome)
                        healthy = outcome.whole_s is not None and not outcome.error
                        console.print(_line(len(outcomes), len(faults), outcome), markup=False, highlight=False)
                    closing.setdefault(str(setup), []).extend(world.shut())
    return outcomes, closing


def _line(n: int, of: int, outcome: Outcome) -> str:
    text = f"{n}/{of} {outcome.setup}: {outcome.kind}: pause {outcome.pause_s:.3f} s"
    text += f", whole after {outcome.whole_s:.2f} s" if outcome.whole_s is not None else ", NOT WHOLE"
    if not outcome.same_tokens:
        text += ", TOKENS DIFFER"
    if outcome.past_deadline:
        text += ", PAST DEADLINE"
    return "; ".join([text, *outcome.leaks, outcome.error] if outcome.error else [text, *outcome.leaks])


def _cell(value: str | float | None) -> str:
    return "never" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def main(
    n: Annotated[int, typer.Option("--n", help="Faults; one generation each.")] = 200,
    seed: Annotated[int, typer.Option("--seed", help="Start of the random numbers that draw them.")] = 1,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Where the result goes.")] = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    console = Console(stderr=True)
    started = time.monotonic()
    outcomes, closing = run_faults(draw_faults(n, seed), console, host_device, server_device)
    rows = kind_rows(outcomes)
    table = Table(title=f"{n} faults, seed {seed}, 2 servers; deadline of a dispatch {FLOOR_S:g} to {DEADLINE_S:g} s")
    for field in fields(KindRow):
        left_side = field.name == "fault"
        heading = field.name.replace("_", " ")
        table.add_column(heading, justify="left" if left_side else "right", no_wrap=left_side)
    for row in rows:
        table.add_row(*(_cell(value) for value in vars(row).values()))
    Console(width=160).print(table)
    left = [f"{setup}: {what}" for setup, leaks in closing.items() for what in leaks]
    print(f"left after closing: {'; '.join(left) or 'nothing'}")
    settings = {
        "n": n,
        "seed": seed,
        "deadline_s": [FLOOR_S, DEADLINE_S],
        "pause_limit_s": DEADLINE_S * SPARE,
        "whole_limit_s": WHOLE_TIMEOUT_S,
        "host_device": host_device,
        "server_device": server_device,
        "links": "loopback addresses 127.0.0.1 and 127.0.0.2",
    }
    figures = summary(outcomes) | {"left_after_closing": left, "seconds": time.monotonic() - started}
    if json is not None:
        write_results(json, "faults", settings, rows, figures, outcomes)
    if left or not all(outcome.ok for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
