"""Which part of the uses of experts finds them in the fast tier of a server with ``--ram-gib``, and at how many moves?

``python bench/two_tiers.py [--json FILE]``: 128 experts, 8 in each step, room for 32, over traces of 4,000 steps; no
model and no clock, so the figures are the same on every machine. Beside ours: the experts that came first stay
(static), plain "the least recently used goes", which moves every expert that was missing, and the best choice of
experts that stay, made with the whole trace known.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from servers import write_json

from moeoffload.expert_server.two_tiers import HotExperts

EXPERTS, TOP_K, ROOM, STEPS = 128, 8, 32, 4000
Trace = Iterator[Any]


@dataclass(frozen=True)
class Row:
    """One trace. Shares of uses that found their expert in the fast tier; ``by_quarter``: ours, in parts of the trace.

    Moves are experts that came in a step, on average and at most.
    """

    trace: str
    best_static: float
    static: float
    lru: float
    lru_moves: float
    ours: float
    ours_moves: float
    ours_most_moves: int
    by_quarter: list[float]


def zipf(rng: np.random.Generator) -> Trace:
    """Some experts are always more popular."""
    yield from _by_rank(rng, lambda step, order: None)


def drifting(rng: np.random.Generator) -> Trace:
    """Each 20 steps one of the 16 most popular experts changes its place with any other."""

    def change(step: int, order: Any) -> None:
        if step % 20 == 0:
            one, other = rng.integers(0, 16), rng.integers(0, EXPERTS)
            order[[one, other]] = order[[other, one]]

    yield from _by_rank(rng, change)


def jumping(rng: np.random.Generator) -> Trace:
    """Each 1,000 steps all experts change their popularity."""
    yield from _by_rank(rng, lambda step, order: rng.shuffle(order) if step % 1000 == 0 else None)


def in_turn(rng: np.random.Generator) -> Trace:
    """Adversarial to the least recently used: 40 experts in turn, 8 more than there is room for."""
    yield from ((np.arange(TOP_K) + TOP_K * step) % (ROOM + TOP_K) for step in range(STEPS))


def by_sets(rng: np.random.Generator) -> Trace:
    """Adversarial to a long memory: two sets of 32 experts, for 100 steps each."""
    for step in range(STEPS):
        yield np.arange(TOP_K) + rng.integers(0, ROOM - TOP_K + 1) + (ROOM if step // 100 % 2 else 0)


TRACES: tuple[Callable[[np.random.Generator], Trace], ...] = (zipf, drifting, jumping, in_turn, by_sets)


def _by_rank(rng: np.random.Generator, change: Callable[[int, Any], None]) -> Trace:
    popular = 1 / np.arange(1, EXPERTS + 1)
    popular /= popular.sum()
    order = rng.permutation(EXPERTS)
    for step in range(STEPS):
        change(step, order)
        yield order[rng.choice(EXPERTS, TOP_K, replace=False, p=popular)]


def lru(trace: Trace) -> tuple[float, float]:
    """Share of hits, and moves per step."""
    held = OrderedDict.fromkeys(range(ROOM))
    hits = moves = 0
    for used in trace:
        for expert in used:
            if expert in held:
                hits += 1
                held.move_to_end(expert)
            else:
                held.popitem(last=False)
                held[expert] = None
                moves += 1
    return hits / (STEPS * TOP_K), moves / STEPS


def follow(trace: Trace) -> tuple[list[int], list[int]]:
    """Hits and moves of each step."""
    hot = HotExperts(EXPERTS, ROOM, TOP_K)
    hits, moves = [], []
    for used in trace:
        hits.append(int(hot.is_fast[used].sum()))
        asked = hot.step(used)
        moves.append(len(asked))
        for move in asked:
            hot.move(*move)
    return hits, moves


def measure(trace: Callable[[np.random.Generator], Trace]) -> Row:
    """All policies over the same steps."""
    steps = list(trace(np.random.default_rng(0)))
    uses = STEPS * TOP_K
    counts = Counter(int(expert) for used in steps for expert in used)
    hits, moves = follow(iter(steps))
    quarters = [sum(part) / (len(part) * TOP_K) for part in np.split(np.array(hits), 4)]
    return Row(
        trace.__name__.replace("_", " "),
        sum(count for _, count in counts.most_common(ROOM)) / uses,
        sum(count for expert, count in counts.items() if expert < ROOM) / uses,
        *lru(iter(steps)),
        sum(hits) / uses,
        sum(moves) / STEPS,
        max(moves),
        [float(each) for each in quarters],
    )


def main(json: Annotated[Path | None, typer.Option(help="Where the result goes.")] = None) -> None:
    """Compare the policies."""
    rows = [measure(trace) for trace in TRACES]
    table = Table(title=f"hits in the fast tier: {EXPERTS} experts, {TOP_K} a step, room for {ROOM}")
    for column in ("trace", "best static", "static", "LRU", "moves/step", "ours", "moves/step", "by quarter"):
        table.add_column(column, justify="left" if column == "trace" else "right")
    for row in rows:
        shares = (f"{row.best_static:.1%}", f"{row.static:.1%}", f"{row.lru:.1%}", f"{row.lru_moves:.2f}")
        quarters = " ".join(f"{each:.0%}" for each in row.by_quarter)
        table.add_row(row.trace, *shares, f"{row.ours:.1%}", f"{row.ours_moves:.2f}", quarters)
    Console().print(table)
    if json is not None:
        settings = {"experts": EXPERTS, "top_k": TOP_K, "room": ROOM, "steps": STEPS}
        write_json(json, "two_tiers", settings, rows)


if __name__ == "__main__":
    typer.run(main)
