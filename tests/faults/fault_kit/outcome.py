"""What came of one fault."""

from __future__ import annotations

from dataclasses import dataclass, field


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
        return self.same_tokens and self.whole_s is not None and not (self.past_deadline or self.leaks or self.error)
