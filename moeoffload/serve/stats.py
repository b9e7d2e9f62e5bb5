"""Counters of the engine, for /metrics, /stats, the dashboard and ``moeoffload top``.

The engine's thread counts; other threads take a `ServingStats.snapshot`. Counting is a few additions per step.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from typing import Any, Final

LATENCY_BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
ROW_BOUNDS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)


@dataclass(slots=True)
class Histogram:
    """Counts of values up to each bound (inclusive), and above the last."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0
    n: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.n += 1


@dataclass(slots=True)
class RequestCounts:
    """Requests by outcome; running and waiting are current."""

    running: int = 0
    waiting: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0


@dataclass(slots=True)
class TokenCounts:
    """Prompt tokens (``reused`` came from the cache), drafted tokens (``guessed_right`` were accepted) and tokens of
    answers (``completion``)."""

    prompt: int = 0
    reused: int = 0
    guessed: int = 0
    guessed_right: int = 0
    completion: int = 0


@dataclass(slots=True)
class CacheUse:
    """Use of the KV cache."""

    used_tokens: int = 0
    kept_tokens: int = 0  # of no running request, kept for reuse
    total_tokens: int = 0
    total_bytes: int = 0


@dataclass(slots=True)
class StepTimes:
    """Steps and their total seconds; a snapshot adds the parts, from the recorder."""

    steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class ServingStats:
    """All counters of one engine; ``step_rows`` counts the rows (tokens) of each step."""

    cache: CacheUse = field(default_factory=CacheUse)
    requests: RequestCounts = field(default_factory=RequestCounts)
    tokens: TokenCounts = field(default_factory=TokenCounts)
    steps: StepTimes = field(default_factory=StepTimes)
    first_token_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    between_tokens_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    step_rows: Histogram = field(default_factory=lambda: Histogram(ROW_BOUNDS))
    started: float = field(default_factory=time.time)

    def snapshot(self) -> dict[str, Any]:
        """All counters as plain data; may be a step old."""
        now, data = time.time(), asdict(self)
        return {"time": now, "uptime_s": now - data.pop("started")} | data
