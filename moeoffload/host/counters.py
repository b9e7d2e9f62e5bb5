"""The counters on the path of every call: plain attributes, so that counting costs next to nothing."""

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
    wait_s: float = 0.0
    """How long the host was blocked on this server's replies; less for servers whose replies are taken later."""


@dataclass(slots=True)
class LayerTimes:
    """Host seconds of the routed-expert calls of one MoE layer, or of all of them.

    ``dense_s`` is the dense work since the previous call, ``pack_s`` encoding and sending rows, ``local_s`` experts on
    the host, ``combine_s`` adding up the sums. ``wait_s`` is waiting for replies; ``wait_queue_s`` and
    ``wait_compute_s`` are the parts of it that servers spent queueing and computing, the rest is transport.
    """

    calls: int = 0
    dense_s: float = 0.0
    pack_s: float = 0.0
    local_s: float = 0.0
    wait_s: float = 0.0
    wait_queue_s: float = 0.0
    wait_compute_s: float = 0.0
    combine_s: float = 0.0

    def clear(self) -> None:
        """Resets the figures for one new call."""
        self.calls = 1
        self.dense_s = self.pack_s = self.local_s = self.combine_s = 0.0
        self.wait_s = self.wait_queue_s = self.wait_compute_s = 0.0

    def add(self, other: LayerTimes) -> None:
        """Adds the figures of ``other``."""
        self.calls += other.calls
        self.dense_s += other.dense_s
        self.pack_s += other.pack_s
        self.local_s += other.local_s
        self.wait_s += other.wait_s
        self.wait_queue_s += other.wait_queue_s
        self.wait_compute_s += other.wait_compute_s
        self.combine_s += other.combine_s


@dataclass(slots=True)
class PhaseCounters(LayerTimes):
    """One phase (prefill or decode) of a run, in seconds of host time. Every part is measured, none is a remainder.

    ``seconds`` is the wall time of the phase: ``forward_s`` in forward passes, ``other_s`` in sampling and streaming
    between them. In a pipelined prefill ``turn_s`` is how long chunks waited for the chunk before, and ``thread_s`` the
    time of the second thread, which comes on top of the wall time.
    """

    forwards: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    forward_s: float = 0.0
    thread_s: float = 0.0
    local_rows: int = 0
    turn_s: float = 0.0
    other_s: float = 0.0
    pipelined: int = 0
    servers: list[CallCounters] = field(default_factory=list)
    layers: list[LayerTimes] = field(default_factory=list)
    mark: float = 0.0  # time.perf_counter() when the current stretch of dense work began

    def lap_dense(self, now: float) -> None:
        """Ends a stretch of dense work at ``now`` and begins the next one."""
        self.dense_s += now - self.mark
        self.mark = now

    def turn(self, waited_s: float) -> None:
        """Excludes a wait for another chunk from the current stretch of dense work."""
        self.turn_s += waited_s
        self.mark += waited_s

    @property
    def accounted(self) -> float:
        """Sum of the parts as a share of the time of all threads, 0 to 1."""
        total = self.seconds + self.thread_s
        parts = self.dense_s + self.pack_s + self.local_s + self.wait_s + self.turn_s + self.combine_s + self.other_s
        return parts / total if total else 1.0


def add_counters(total: PhaseCounters, part: PhaseCounters) -> None:
    """Adds every figure of ``part`` to ``total``, server by server and layer by layer."""
    add_fields(total, part)
    for server, more in zip(total.servers, part.servers, strict=True):
        add_fields(server, more)
    for layer, times in zip(total.layers, part.layers, strict=True):
        add_fields(layer, times)


def add_fields(total: CallCounters | LayerTimes, part: CallCounters | LayerTimes) -> None:
    """Adds the figures of ``part`` to ``total``, of the same class, except those by server or layer."""
    for each in fields(total):
        if each.name not in ("servers", "layers", "mark"):
            setattr(total, each.name, getattr(total, each.name) + getattr(part, each.name))
