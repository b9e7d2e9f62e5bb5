"""Counts what a run does: which phase it is in, how long forwards take, where the time of the experts path goes.

The counters on the path of every call are plain attributes, so that counting costs next to nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

PREFILL: Final = "prefill"
DECODE: Final = "decode"
PHASES: Final = (PREFILL, DECODE)


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
    between them; ``head_s`` is the dense work after the last MoE layer. Where two threads compute a pass, ``turn_s`` is
    how long one waited for the other, and ``thread_s`` the time of the second one, which comes on top of the wall time.
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
        """Excludes a wait for the other thread from the current stretch of dense work."""
        self.turn_s += waited_s
        self.mark += waited_s

    @property
    def times(self) -> LayerTimes:
        """The times of all layers together, and of the dense work after the last one."""
        total = LayerTimes(dense_s=self.head_s)
        for layer in self.layers:
            add_counters(total, layer)
        return total

    @property
    def accounted(self) -> float:
        """Sum of the parts as a share of the time of all threads, 0 to 1."""
        total, times = self.seconds + self.thread_s, self.times
        parts = times.dense_s + times.pack_s + times.local_s + times.wait_s + times.combine_s
        return (parts + self.turn_s + self.other_s) / total if total else 1.0


_Figures = TypeVar("_Figures", CallCounters, LayerTimes, PhaseCounters)


def add_counters(total: _Figures, part: _Figures) -> None:
    """Adds every figure of ``part`` to ``total``, server by server and layer by layer."""
    for each in fields(total):
        known, more = getattr(total, each.name), getattr(part, each.name)
        if isinstance(known, list):
            for one, other in zip(known, more, strict=True):
                add_counters(one, other)
        else:
            setattr(total, each.name, known + more)


def _add_phases(total: dict[str, PhaseCounters], part: dict[str, PhaseCounters]) -> None:
    for name, counters in part.items():
        add_counters(total[name], counters)


class Clock:
    """Watches one call of a layer's routed experts after the other, for one thread: when is the dense work done?

    A CPU has done it when the call returns, a GPU later than the host has told it: of the host's time from the first
    dense kernel of a layer to its rows being on their way, a GPU's dense work would seem to be the first few
    microseconds, and packing, which has to wait for it, all the rest.

    This one is for devices that are never late, and for others while nobody listens.
    """

    def dense_told(self) -> None:
        """The device has been told all the dense work before the call."""

    def dense_late_s(self) -> float:
        """Waits for the device; returns the seconds since `dense_told` that it still took for the dense work."""
        return 0.0

    def wait(self) -> None:
        """Waits for all that the device was told."""


class DeviceClock(Clock):
    """Of a GPU, be that the current device or not. Its events are made once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._dense, self._now = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._told_at = 0.0

    def dense_told(self) -> None:
        """See `Clock`."""
        self._dense.record(torch.cuda.current_stream(self._device))
        self._told_at = perf_counter()

    def dense_late_s(self) -> float:
        """See `Clock`. What the device has computed since is no dense work, so this is the rest of the host's time."""
        self.wait()
        since_s = perf_counter() - self._told_at
        return min(since_s, max(0.0, since_s - self._dense.elapsed_time(self._now) / 1e3))

    def wait(self) -> None:
        """See `Clock`."""
        self._now.record(torch.cuda.current_stream(self._device))
        self._now.synchronize()


HOST_CLOCK: Final = Clock()


@dataclass(slots=True)
class GuessCounts:
    """Tokens that were guessed, those of them that turned out right, the passes that verified them, and all tokens of
    the answers: one of each pass, and the right guesses."""

    guessed: int = 0
    right: int = 0
    passes: int = 0
    tokens: int = 0


class _Thread(threading.local):
    """What one thread runs: its counters of each phase, its clock, and when its last forward pass began and ended.

    ``phase`` is what it runs; a thread that helps another one takes that one's. ``next_phase`` is that of its next
    forward pass, where the shape does not tell (packed requests).
    """

    def __init__(self, device: torch.device) -> None:
        self.phases: dict[str, PhaseCounters] = {}
        self.clock = DeviceClock(device) if device.type == "cuda" else HOST_CLOCK
        self.phase = PREFILL
        self.next_phase: str | None = None
        self.started = self.last_end = 0.0


class Recorder:
    """Collects the counters of both phases.

    Every thread that runs a part of a forward pass counts into ``own`` counters, which need no lock; `phases` adds them
    up.
    """

    def __init__(self, n_servers: int, n_layers: int, device: torch.device, *, profile: bool = False) -> None:
        """Counts for ``n_servers`` and ``n_layers`` MoE layers; with ``profile`` it always listens, see `listen`, and
        reports show each layer. ``device`` is that of the dense layers."""
        self.n_servers = n_servers
        self.n_layers = n_layers
        self.profile = profile
        self._device = device
        self._lock = threading.Lock()
        self._listened_until = math.inf if profile else 0.0
        self._listened = profile
        """Whether somebody listens to the running forward pass; else no device is asked when it was done."""
        self.reset()

    def reset(self) -> None:
        """Starts again from zero. Not while a forward pass runs."""
        self.own = _Thread(self._device)
        self._ended = {name: self._new_counters() for name in PHASES}  # of threads that have ended
        self._by_thread: dict[threading.Thread, dict[str, PhaseCounters]] = {}
        # Tokens computed of prompts and of answers, if passes have packed requests or guesses and do not tell; else 0.
        self.prompt_tokens = self.completion_tokens = 0
        self.guesses = GuessCounts()

    @property
    def counters(self) -> PhaseCounters:
        """This thread's counters of the phase that it runs."""
        own = self.own
        if not own.phases:
            own.phases = {name: self._new_counters() for name in PHASES}
            with self._lock:
                for thread in [thread for thread in self._by_thread if not thread.is_alive()]:
                    _add_phases(self._ended, self._by_thread.pop(thread))
                self._by_thread[threading.current_thread()] = own.phases
        return own.phases[own.phase]

    @property
    def clock(self) -> Clock:
        """When this thread's dense work is done, if somebody listens; else that of a device that is never late."""
        return self.own.clock if self._listened else HOST_CLOCK

    @property
    def phases(self) -> dict[str, PhaseCounters]:
        """The counters of each phase, over all threads."""
        total = {name: self._new_counters() for name in PHASES}
        with self._lock:
            for phases in (self._ended, *self._by_thread.values()):
                _add_phases(total, phases)
        return total

    def count_verified(self, guessed: int, right: int, tokens: int) -> None:
        """Counts a pass that verified ``guessed`` tokens, ``right`` of them right, and yielded ``tokens`` tokens."""
        counts = self.guesses
        counts.guessed += guessed
        counts.right += right
        counts.passes += 1
        counts.tokens += tokens

    def listen(self, seconds: float = math.inf) -> None:
        """Tells dense work of a GPU from what waits for it, for so many seconds from now, in passes that begin in them;
        without, the host's times count it where the host waits. From any thread, as often as one likes."""
        self._listened_until = max(self._listened_until, perf_counter() + seconds)

    def watch(self, model: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        """Times the forward passes of ``model`` until the returned hooks are removed."""
        before = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        return before, model.register_forward_hook(self._after_forward)

    @contextmanager
    def beside(self, phase: str, n_tokens: int = 0) -> Iterator[None]:
        """Counts what this thread runs meanwhile as help for another one's pass of a phase, with ``n_tokens`` that this
        pass does not count."""
        self.own.phase = phase
        counters = self.counters
        started = counters.mark = perf_counter()
        try:
            yield
        finally:
            self.clock.wait()
            ended = perf_counter()
            counters.lap_head(ended)
            counters.thread_s += ended - started
            counters.tokens += n_tokens

    def waited_beside(self, seconds: float) -> None:
        """Counts what this thread waited, after its forward pass, for one that helped."""
        counters = self.counters
        counters.turn_s += seconds
        counters.seconds += seconds
        counters.forward_s += seconds
        self.own.last_end += seconds

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args:
            kwargs = {"input_ids": args[0], **kwargs}
        tokens = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
        n_sequences, length = tokens.shape[0], tokens.shape[1]
        own = self.own
        own.phase = own.next_phase or (DECODE if length == 1 else PREFILL)
        own.next_phase = None
        counters = self.counters
        counters.forwards += 1
        counters.sequences += n_sequences
        counters.tokens += n_sequences * length
        own.started = counters.mark = perf_counter()
        self._listened = own.started < self._listened_until
        if own.phase == DECODE and own.last_end:
            counters.other_s += own.started - own.last_end

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self.clock.wait()
        ended = perf_counter()
        own, counters = self.own, self.counters
        counters.lap_head(ended)
        counters.forward_s += ended - own.started
        # Between two forwards of decoding lies the sampling; before a prefill lies whatever the caller did.
        begun = own.last_end if own.phase == DECODE and own.last_end else own.started
        counters.seconds += ended - begun
        own.last_end = ended

    def _new_counters(self) -> PhaseCounters:
        return PhaseCounters(
            servers=[CallCounters() for _ in range(self.n_servers)], layers=[LayerTimes() for _ in range(self.n_layers)]
        )
