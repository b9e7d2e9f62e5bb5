"""What is counted on the path of every call: plain attributes, so that counting costs next to nothing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CallCounters:
    """Dispatches of one phase to one server. Bytes include headers; times are the server's, in seconds."""

    calls: int = 0
    rows: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0


@dataclass(slots=True)
class PhaseCounters:
    """One phase (prefill or decode) of a run, in seconds of host time.

    ``seconds`` is the wall time of the phase: ``forward_s`` in forward passes, the rest in sampling and streaming. Of
    the forward passes, ``pack_s`` went into encoding and sending rows, ``wait_s`` into waiting for replies and
    ``combine_s`` into adding them up; what remains is dense work.
    """

    forwards: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    forward_s: float = 0.0
    pack_s: float = 0.0
    wait_s: float = 0.0
    combine_s: float = 0.0
    servers: list[CallCounters] = field(default_factory=list)

    @property
    def dense_s(self) -> float:
        """Forward time that was not spent on remote experts."""
        return max(0.0, self.forward_s - self.pack_s - self.wait_s - self.combine_s)
