"""What is counted on the path of every call: plain attributes, so that counting costs next to nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TypeVar


@dataclass(slots=True)
class CallCounters:
    """Dispatches of one phase to one server. Bytes include headers; times are the server's, in seconds."""

    calls: int = 0
    rows: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    """How long the host stood still for this server's replies; servers that come later in the order have less."""


@dataclass(slots=True)
class LayerTimes:
    """Host seconds and calls of one MoE layer in one phase, collected while somebody looks.

    ``dense_s`` is the dense work since the layer before. Of ``wait_s``, ``wait_queue_s`` and ``wait_compute_s`` were
    the servers'.
    """

    calls: int = 0
    dense_s: float = 0.0
    pack_s: float = 0.0
    local_s: float = 0.0
    wait_s: float = 0.0
    wait_queue_s: float = 0.0
    wait_compute_s: float = 0.0
    combine_s: float = 0.0

    def add(
        self, dense_s: float, pack_s: float, local_s: float, wait_s: float, wait_queue_s: float, wait_compute_s: float,
        combine_s: float,
    ) -> None:  # fmt: skip
        """Adds one call."""
        self.calls += 1
        self.dense_s += dense_s
        self.pack_s += pack_s
        self.local_s += local_s
        self.wait_s += wait_s
        self.wait_queue_s += wait_queue_s
        self.wait_compute_s += wait_compute_s
        self.combine_s += combine_s


@dataclass(slots=True)
class PhaseCounters:
    """One phase (prefill or decode) of a run, in seconds of host time.

    ``seconds`` is the wall time of the phase: ``forward_s`` in forward passes, ``other_s`` in sampling and streaming
    between them. Of the forward passes, ``dense_s`` went into dense layers, ``pack_s`` into encoding and sending rows,
    ``local_s`` into experts on the host, and ``combine_s`` into adding up. ``wait_s`` is the waiting for replies; the
    server says how much of it was its own: ``wait_queue_s`` and ``wait_compute_s``, the rest was on the way.
    ``turn_s`` is the waiting of one chunk of a pipelined prefill for the one before it, ``thread_s`` the time that the
    second thread of a pipelined prefill took, beyond the wall time. Every part is measured, none is a remainder.
    """

    forwards: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    forward_s: float = 0.0
    thread_s: float = 0.0
    dense_s: float = 0.0
    pack_s: float = 0.0
    local_s: float = 0.0
    local_rows: int = 0
    wait_s: float = 0.0
    wait_queue_s: float = 0.0
    wait_compute_s: float = 0.0
    turn_s: float = 0.0
    combine_s: float = 0.0
    other_s: float = 0.0
    pipelined: int = 0
    servers: list[CallCounters] = field(default_factory=list)
    layers: list[LayerTimes] = field(default_factory=list)
    mark: float = 0.0
    """When the running stretch of dense work began; time.perf_counter()."""

    def lap_dense(self, now: float) -> None:
        """Ends a stretch of dense work at ``now`` and begins the next one."""
        self.dense_s += now - self.mark
        self.mark = now

    def turn(self, waited_s: float) -> None:
        """Takes a wait for another chunk out of the running stretch of dense work."""
        self.turn_s += waited_s
        self.mark += waited_s

    @property
    def accounted(self) -> float:
        """Share of the time of all threads that the parts add up to, 0 to 1."""
        total = self.seconds + self.thread_s
        parts = self.dense_s + self.pack_s + self.local_s + self.wait_s + self.turn_s + self.combine_s + self.other_s
        return parts / total if total else 1.0


def add_counters(total: PhaseCounters, part: PhaseCounters) -> None:
    """Adds every figure of ``part`` to ``total``, server by server and layer by layer."""
    _add_fields(total, part)
    for server, more in zip(total.servers, part.servers, strict=True):
        _add_fields(server, more)
    for layer, times in zip(total.layers, part.layers, strict=True):
        _add_fields(layer, times)


_Counters = TypeVar("_Counters", CallCounters, LayerTimes, PhaseCounters)


def _add_fields(total: _Counters, part: _Counters) -> None:
    for each in fields(total):
        if each.name not in ("servers", "layers", "mark"):
            setattr(total, each.name, getattr(total, each.name) + getattr(part, each.name))
