"""Results of the benchmarks of faults as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fault_kit.outcome import Outcome
from servers import machine


def write_results(
    path: Path,
    benchmark: str,
    settings: dict[str, Any],
    rows: Sequence[Any],
    figures: dict[str, Any],
    runs: Sequence[Any],
) -> None:
    """Writes ``rows`` (dataclasses) for a table, totals, and the single ``runs`` (dataclasses) behind them."""
    data = {
        "benchmark": benchmark,
        "machine": machine(),
        "settings": settings,
        "rows": [asdict(row) for row in rows],
        "figures": figures,
        "runs": [asdict(run) for run in runs],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n")


@dataclass(frozen=True)
class KindRow:
    """All runs with one kind of fault. Times in seconds, see `Outcome`; None where a server was not used again."""

    fault: str
    runs: int
    same_tokens: int
    pause_median_s: float
    pause_max_s: float
    whole_again_median_s: float | None
    whole_again_max_s: float | None
    leaks: int
    past_deadline: int
    servers_lost: int
    replica_calls: int
    fallback_calls: int


def kind_rows(outcomes: Sequence[Outcome]) -> list[KindRow]:
    """One row per kind, and one for all."""
    kinds = sorted({outcome.kind for outcome in outcomes})
    rows = [_row(kind, [outcome for outcome in outcomes if outcome.kind == kind]) for kind in kinds]
    return [*rows, _row("all", outcomes)]


def _row(name: str, outcomes: Sequence[Outcome]) -> KindRow:
    pauses = [outcome.pause_s for outcome in outcomes]
    whole = [outcome.whole_s for outcome in outcomes if outcome.whole_s is not None]
    return KindRow(
        fault=name,
        runs=len(outcomes),
        same_tokens=sum(outcome.same_tokens for outcome in outcomes),
        pause_median_s=statistics.median(pauses),
        pause_max_s=max(pauses),
        whole_again_median_s=statistics.median(whole) if whole else None,
        whole_again_max_s=max(whole) if len(whole) == len(outcomes) else None,
        leaks=sum(bool(outcome.leaks) for outcome in outcomes),
        past_deadline=sum(outcome.past_deadline for outcome in outcomes),
        servers_lost=sum(outcome.lost for outcome in outcomes),
        replica_calls=sum(outcome.replica_calls for outcome in outcomes),
        fallback_calls=sum(outcome.fallback_calls for outcome in outcomes),
    )


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The totals, for JSON."""
    whole = [outcome.whole_s for outcome in outcomes if outcome.whole_s is not None]
    return {
        "runs": len(outcomes),
        "same_tokens": sum(outcome.same_tokens for outcome in outcomes),
        "past_deadline": sum(outcome.past_deadline for outcome in outcomes),
        "leaks": sum(bool(outcome.leaks) for outcome in outcomes),
        "errors": sum(bool(outcome.error) for outcome in outcomes),
        "never_whole": sum(outcome.whole_s is None for outcome in outcomes),
        "pause_max_s": max((outcome.pause_s for outcome in outcomes), default=0.0),
        "whole_max_s": max(whole, default=0.0),
    }
