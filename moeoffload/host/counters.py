"""The counters on the path of every call: plain attributes, so that counting costs next to nothing."""

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


@dataclass(slots=True)
class PhaseCounters:
    """One phase (prefill or decode) of a run, in seconds of host time. Every part is measured, none is a remainder.

    ``seconds`` is the wall time of the phase: ``forward_s`` in forward passes, ``other_s`` in sampling and streaming
    between them; ``head_s`` is the dense work after the last MoE layer. In a pipelined prefill ``turn_s`` is how long
    chunks waited for the chunk before, and ``thread_s`` the time of the second thread, which comes on top of the wall
    time.
    """

    forwards: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    forward_s: float = 0.0
    head_s: float = 0.0
    thread_s: float = 0.0
    local_rows: int = 0
    turn_s: float = 0.0
    other_s: float = 0.0
    pipelined: int = 0
    servers: list[CallCounters] = field(default_factory=list)
    layers: list[LayerTimes] = field(default_factory=list)
    mark: float = 0.0  # time.perf_counter() when the current stretch of dense work began

    def lap_head(self, now: float) -> None:
        """Ends the dense work after the last MoE layer at ``now``."""
        self.head_s += now - self.mark
        self.mark = now

    def turn(self, waited_s: float) -> None:
        """Excludes a wait for another chunk from the current stretch of dense work."""
        self.turn_s += waited_s
        self.mark += waited_s

    @property
    def times(self) -> LayerTimes:
        """The times of all layers together, and of the dense work after the last one."""
        total = LayerTimes(dense_s=self.head_s)
        for layer in self.layers:
            add_fields(total, layer)
        return total

    @property
    def accounted(self) -> float:
        """Sum of the parts as a share of the time of all threads, 0 to 1."""
        total, times = self.seconds + self.thread_s, self.times
        parts = times.dense_s + times.pack_s + times.local_s + times.wait_s + times.combine_s
        return (parts + self.turn_s + self.other_s) / total if total else 1.0


def add_counters(total: PhaseCounters, part: PhaseCounters) -> None:
    """Adds every figure of ``part`` to ``total``, server by server and layer by layer."""
    add_fields(total, part)
    for server, more in zip(total.servers, part.servers, strict=True):
        add_fields(server, more)
    for layer, times in zip(total.layers, part.layers, strict=True):
        add_fields(layer, times)


_Figures = TypeVar("_Figures", CallCounters, LayerTimes, PhaseCounters)


def add_fields(total: _Figures, part: _Figures) -> None:
    """Adds the figures of ``part`` to ``total``, except those by server or layer."""
    for each in fields(total):
        if each.name not in ("servers", "layers", "mark"):
            setattr(total, each.name, getattr(total, each.name) + getattr(part, each.name))
