"""What the engine has done since its start. Only who computes writes; who reads may see one call half counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

MEMBER_CLASSES: Final = ("1", "2", "3", "4", "5-8", "9+")
"""Of the histogram of requests in one kernel call."""


def member_class(n_members: int) -> int:
    """Place in the histogram of a call of so many requests."""
    if n_members <= 4:
        return n_members - 1
    return 4 if n_members <= 8 else 5


@dataclass(slots=True)
class EngineCounters:
    """Totals; times in seconds. A batch is one kernel call, for one request or several."""

    requests: int = 0
    rows: int = 0
    errors: int = 0
    skipped: int = 0
    """Requests that were not computed since their hosts did not wait for them any more."""
    queue_s: float = 0.0
    """Over all requests, from their arrival to the beginning of their call."""
    compute_s: float = 0.0
    members: list[int] = field(default_factory=lambda: [0] * len(MEMBER_CLASSES))
    """Batches by their number of requests, in `MEMBER_CLASSES`."""
    batch_wait_s: float = 0.0
    """Over all batches, what the member that waited longest has waited."""
    collect_s: float = 0.0
    """Of that, waited on purpose: 0 without a collection window."""
