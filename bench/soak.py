"""Mixed runs with faults for a long time: does anything grow? ``python bench/soak.py --minutes 30 --json FILE``.

Faults of all kinds as in ``bench/faults.py``; every few of them the model is closed and opened in another setup. One
server lives through all of it (faults that end a process hit the other one), and so does the host. After each run, with
everything whole again, resident memory, descriptors and threads of both are noted. A line is fitted to what comes after
the warm-up: flat is what grows less over the whole time than the limit. Exit code 1 if something is not flat, or a run
is not as it should be.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import fault_path  # noqa: F401  (before what it makes importable)
import typer
from devices import CPU, HostDevice, ServerDevice
from fault_kit.outcome import Outcome
from fault_kit.schedule import SETUPS, Fault, draw_faults
from fault_kit.world import World
from fault_results import summary, write_results
from rich.console import Console
from rich.table import Table

FAULTS_PER_OPENING = 6
WARM_UP = 0.25
ENDS_PROCESS = ("killed", "drained", "other model", "died writing a reply")
SURVIVOR, VICTIM = 0, 1
LIMITS = {"resident_mib": 0.03, "descriptors": 1.0, "threads": 2.0}
"""Most growth over the measured time: of the mean for memory, else a count."""


@dataclass(frozen=True)
class Sample:
    """What a process held after a run."""

    at_s: float
    setup: str
    who: str
    resident_mib: float
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Trend:
    """One figure of one process: first and last sample, the largest, and the line through those after the warm-up."""

    who: str
    what: str
    first: float
    last: float
    most: float
    per_hour: float
    growth: float
    """Of that line, over the time it was fitted to."""
    flat: bool


def faults_forever(seed: int) -> Iterator[Fault]:
    """All kinds, a setup at a time."""
    while True:
        drawn = draw_faults(FAULTS_PER_OPENING * 20, seed)
        by_setup = {setup: [fault for fault in drawn if fault.setup == setup] for setup in SETUPS}
        while all(len(faults) >= FAULTS_PER_OPENING for faults in by_setup.values()):
            for setup in SETUPS:
                for fault in (by_setup[setup].pop() for _ in range(FAULTS_PER_OPENING)):
                    ends = fault.kind.name in ENDS_PROCESS
                    yield replace(fault, victim=VICTIM if ends else fault.victim)
        seed += 1


def soak(
    minutes: float, seed: int, console: Console, host_device: str, server_device: str
) -> tuple[list[Sample], list[Outcome], list[str]]:
    """Samples, outcomes, and what was left at the end."""
    samples: list[Sample] = []
    outcomes: list[Outcome] = []
    started = time.monotonic()
    faults = faults_forever(seed)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        world = stack.enter_context(World(Path(tempfile.mkdtemp(dir=folder)), "--device", server_device))
        left: list[str] = []
        while time.monotonic() - started < minutes * 60:
            fault = next(faults)
            world.open(fault.setup, device=host_device)
            for n in range(FAULTS_PER_OPENING):
                outcome = world.run(fault)
                outcomes.append(outcome)
                if not outcome.ok:
                    console.print(f"{outcome}", markup=False)
                for who, holding in world.holdings().items():
                    if who != f"server {VICTIM}":
                        sample = (holding.resident_mib, holding.descriptors, holding.threads)
                        samples.append(Sample(time.monotonic() - started, str(fault.setup), who, *sample))
                if n < FAULTS_PER_OPENING - 1:
                    fault = next(faults)
            left += world.shut()
            console.print(
                f"{time.monotonic() - started:.0f} s, {len(outcomes)} runs, host {samples[-2].resident_mib:.0f}, "
                f"server {samples[-1].resident_mib:.0f} MiB",
                highlight=False,
            )
    return samples, outcomes, left


def trends(samples: list[Sample]) -> list[Trend]:
    """Per process and figure. Setups hold different amounts: each is fitted with its own level, all with one slope."""
    found = []
    for who in dict.fromkeys(sample.who for sample in samples):
        own = [sample for sample in samples if sample.who == who]
        warm = [sample for sample in own if sample.at_s >= own[-1].at_s * WARM_UP]
        for what, limit in LIMITS.items():
            values = [float(getattr(sample, what)) for sample in own]
            slope = _common_slope([(sample.setup, sample.at_s, float(getattr(sample, what))) for sample in warm])
            growth = slope * (warm[-1].at_s - warm[0].at_s)
            allowed = limit * statistics.fmean(values) if limit < 1 else limit
            found.append(
                Trend(who, what, values[0], values[-1], max(values), slope * 3600, growth, flat=growth <= allowed)
            )
    return found


def _common_slope(points: list[tuple[str, float, float]]) -> float:
    """Least squares: y = level of its group + slope * x; 0 for too few points."""
    above = below = 0.0
    for group in {point[0] for point in points}:
        xs = [x for name, x, _ in points if name == group]
        ys = [y for name, _, y in points if name == group]
        x_mean, y_mean = statistics.fmean(xs), statistics.fmean(ys)
        above += sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
        below += sum((x - x_mean) ** 2 for x in xs)
    return above / below if below else 0.0


def main(
    minutes: Annotated[float, typer.Option("--minutes", help="How long.")] = 30.0,
    seed: Annotated[int, typer.Option("--seed", help="Start of the random numbers that draw the faults.")] = 1,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Where the result goes.")] = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    samples, outcomes, left = soak(minutes, seed, Console(stderr=True), host_device, server_device)
    rows = trends(samples)
    table = Table(title=f"{minutes:g} minutes, {len(outcomes)} runs with a fault each")
    for heading in ("process", "figure", "first", "last", "most", "slope per hour", "growth", "flat"):
        table.add_column(heading, justify="left" if heading in ("process", "figure") else "right")
    for row in rows:
        figures = (f"{value:.1f}" for value in (row.first, row.last, row.most, row.per_hour, row.growth))
        table.add_row(row.who, row.what, *figures, "yes" if row.flat else "NO")
    Console(width=120).print(table)
    bad = sum(not outcome.ok for outcome in outcomes)
    print(f"{len(outcomes) - bad} of {len(outcomes)} runs as they should be; left after closing: {left or 'nothing'}")
    if json is not None:
        settings = {"minutes": minutes, "seed": seed, "warm_up": WARM_UP, "limits": LIMITS}
        settings |= {"host_device": host_device, "server_device": server_device}
        write_results(json, "soak", settings, rows, summary(outcomes) | {"left_after_closing": left}, samples)
    if bad or left or not all(row.flat for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
