"""What came of one fault, and of many."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """One generation under one fault. Times in seconds."""

    number: int
    kind: str
    setup: str
    server: int
    layer_call: int
    """Before which layer call of the generation it struck."""
    lasts_s: float
    same_tokens: bool = False
    pause_s: float = 0.0
    """The longest time that the generation stood still, from the fault on: noticing and recovering together."""
    limit_s: float = 0.0
    """What `pause_s` may be: the deadline of a dispatch and a fifth more."""
    whole_s: float | None = None
    """From the end of the fault until the host used all servers again; None: not within its limit."""
    lost: int = 0
    returned: int = 0
    replica_calls: int = 0
    fallback_calls: int = 0
    stale: int = 0
    warnings: int = 0
    """Lines in the log of the host."""
    leaks: list[str] = field(default_factory=list)
    error: str = ""
    """Why the generation or the way back ended early; empty if it did not."""

    @property
    def past_deadline(self) -> bool:
        return self.pause_s > self.limit_s

    @property
    def ok(self) -> bool:
        """Same tokens, in time, nothing left behind, everything in use again."""
        return (
            self.same_tokens
            and not self.past_deadline
            and not self.leaks
            and not self.error
            and self.whole_s is not None
        )


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
