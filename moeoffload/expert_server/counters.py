"""Counts the engine's work since its start. Only the computing thread writes; a reader may see a call half counted."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineCounters:
    """Totals; times in seconds. A batch is one kernel call, for one request or several."""

    requests: int = 0
    rows: int = 0
    errors: int = 0
    skipped: int = 0  # requests not computed because their hosts no longer waited for them
    queue_s: float = 0.0  # summed over requests, from arrival to the start of their call
    compute_s: float = 0.0
    members: list[int] = field(default_factory=lambda: [0] * 6)  # batches of 1, 2, 3, 4, 5 to 8 and more requests
    batch_wait_s: float = 0.0  # summed over batches, the wait of the member that waited longest

    def count_batch(self, n_members: int, wait_s: float, compute_s: float) -> None:
        """Counts one kernel call for ``n_members`` requests, the oldest of which had waited for ``wait_s``."""
        self.members[bisect_left((1, 2, 3, 4, 8), n_members)] += 1
        self.batch_wait_s += wait_s
        self.compute_s += compute_s

    def count_request(self, n_rows: int, wait_s: float) -> None:
        """Counts one computed request."""
        self.requests += 1
        self.rows += n_rows
        self.queue_s += wait_s
