"""What is counted on the path of every call: plain attributes, so that counting costs next to nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


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
    the forward passes, ``pack_s`` went into encoding and sending rows, ``local_s`` into experts on the host, and
    ``combine_s`` into adding up. ``wait_s`` is the waiting for replies; the server says how much of it was its own:
    ``wait_queue_s`` and ``wait_compute_s``, the rest was the way there and back. ``turn_s`` is the waiting of one chunk
    of a pipelined prefill for the one before it, ``thread_s`` the time that all threads of a pipelined prefill took
    together beyond the wall time.
    """

    forwards: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    forward_s: float = 0.0
    thread_s: float = 0.0
    pack_s: float = 0.0
    local_s: float = 0.0
    local_rows: int = 0
    wait_s: float = 0.0
    wait_queue_s: float = 0.0
    wait_compute_s: float = 0.0
    turn_s: float = 0.0
    combine_s: float = 0.0
    pipelined: int = 0
    servers: list[CallCounters] = field(default_factory=list)

    @property
    def dense_s(self) -> float:
        """Forward time, over all threads, that was none of the other parts."""
        spent = self.pack_s + self.local_s + self.wait_s + self.turn_s + self.combine_s
        return max(0.0, self.forward_s + self.thread_s - spent)


def add_counters(total: PhaseCounters, part: PhaseCounters) -> None:
    """Adds every figure of ``part`` to ``total``, server by server."""
    _add_fields(total, part)
    for server, more in zip(total.servers, part.servers, strict=True):
        _add_fields(server, more)


def _add_fields(total: CallCounters | PhaseCounters, part: CallCounters | PhaseCounters) -> None:
    for each in fields(total):
        if each.name != "servers":
            setattr(total, each.name, getattr(total, each.name) + getattr(part, each.name))
