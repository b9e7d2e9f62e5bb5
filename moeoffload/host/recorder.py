"""Counts what a run does: which phase it is in, how long forwards take, where the time of the experts path goes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import torch
from torch import nn

from moeoffload.host.counters import CallCounters, LayerTimes, PhaseCounters, add_counters
from moeoffload.host.device_clock import HOST_CLOCK, Clock, clock_of

PREFILL: Final = "prefill"
DECODE: Final = "decode"
PHASES: Final = (PREFILL, DECODE)


@dataclass(slots=True)
class GuessCounts:
    """Tokens that were guessed, those of them that turned out right, the passes that verified them, and all tokens of
    the answers: one of each pass, and the right guesses."""

    guessed: int = 0
    right: int = 0
    passes: int = 0
    tokens: int = 0


@dataclass(slots=True)
class TokenTotals:
    """Tokens of prompts that were computed, and tokens of answers, where forward passes do not tell."""

    prompt: int = 0
    completion: int = 0


class _Thread(threading.local):
    """What one thread runs: its counters of each phase, its clock, and when its last forward pass began and ended.

    ``phase`` is what it runs; a thread that helps another one takes that one's. ``next_phase`` is that of its next
    forward pass, where the shape does not tell (packed requests).
    """

    def __init__(self, device: torch.device) -> None:
        self.phases: dict[str, PhaseCounters] = {}
        self.clock = clock_of(device)
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
        self._listened_until = math.inf if profile else 0.0
        self._listened = profile
        """Whether somebody listens to the running forward pass; else no device is asked when it was done."""
        self.reset()

    def reset(self) -> None:
        """Starts again from zero. Not while a forward pass runs."""
        self.own = _Thread(self._device)
        self._all: list[dict[str, PhaseCounters]] = []
        self.tokens: TokenTotals | None = None  # told by who packs several requests, or guesses, into one pass
        self.guesses: GuessCounts | None = None  # of answers with guesses; None if there were none

    @property
    def counters(self) -> PhaseCounters:
        """This thread's counters of the phase that it runs."""
        own = self.own
        if not own.phases:
            own.phases = {name: self._new_counters() for name in PHASES}
            self._all.append(own.phases)
        return own.phases[own.phase]

    @property
    def clock(self) -> Clock:
        """When this thread's dense work is done, if somebody listens; else that of a device that is never late."""
        return self.own.clock if self._listened else HOST_CLOCK

    @property
    def phases(self) -> dict[str, PhaseCounters]:
        """The counters of each phase, over all threads."""
        total = {name: self._new_counters() for name in PHASES}
        for own in list(self._all):
            for name, counters in own.items():
                add_counters(total[name], counters)
        return total

    def count_verified(self, guessed: int, right: int, tokens: int) -> None:
        """Counts a pass that verified ``guessed`` tokens, ``right`` of them right, and yielded ``tokens`` tokens."""
        counts = self.guesses = self.guesses or GuessCounts()
        counts.guessed += guessed
        counts.right += right
        counts.passes += 1
        counts.tokens += tokens

    def told(self) -> TokenTotals:
        """The totals to add to, for who knows better than forward passes tell."""
        if self.tokens is None:
            self.tokens = TokenTotals()
        return self.tokens

    def listen(self, seconds: float = math.inf) -> None:
        """Tells dense work of a GPU from what waits for it, for so many seconds from now, in passes that begin in them;
        without, the host's times count it where the host waits. From any thread, as often as one likes."""
        self._listened_until = max(self._listened_until, perf_counter() + seconds)

    def watch(self, model: nn.Module) -> Callable[[], None]:
        """Times the forward passes of ``model``; returns a function that stops it."""
        before = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        after = model.register_forward_hook(self._after_forward)

        def stop() -> None:
            before.remove()
            after.remove()

        return stop

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
