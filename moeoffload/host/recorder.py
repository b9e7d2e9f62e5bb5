"""Counts what a run does: which phase it is in, how long forwards take, where the time of the experts path goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

from torch import nn

from moeoffload.host.counters import CallCounters, PhaseCounters

PREFILL: Final = "prefill"
DECODE: Final = "decode"


@dataclass(slots=True)
class LayerTimes:
    """Host seconds and calls of one MoE layer in one phase; collected with the profile setting only."""

    calls: int = 0
    pack_s: float = 0.0
    wait_s: float = 0.0
    combine_s: float = 0.0


@dataclass
class Recorder:
    """Collects the counters of both phases. ``profile`` also keeps the times of each of ``n_layers`` MoE layers."""

    n_servers: int
    n_layers: int
    profile: bool = False
    phases: dict[str, PhaseCounters] = field(init=False)
    layers: dict[str, list[LayerTimes]] = field(init=False)
    calls: list[CallCounters] = field(init=False)
    """The call counters of the running phase, one for each server."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts again from zero."""
        self.phases = {
            name: PhaseCounters(servers=[CallCounters() for _ in range(self.n_servers)]) for name in (PREFILL, DECODE)
        }
        n_layers = self.n_layers if self.profile else 0
        self.layers = {name: [LayerTimes() for _ in range(n_layers)] for name in self.phases}
        self._enter(PREFILL)
        self._started = 0.0
        self._last_end = 0.0

    def _enter(self, name: str) -> None:
        self._phase = self.phases[name]
        self._phase_layers = self.layers[name]
        self.calls = self._phase.servers

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
        self._enter(DECODE if length == 1 else PREFILL)
        self._phase.forwards += 1
        self._phase.sequences += n_sequences
        self._phase.tokens += n_sequences * length
        self._started = perf_counter()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        ended = perf_counter()
        phase = self._phase
        phase.forward_s += ended - self._started
        # Between two forwards of decoding lies the sampling; before a prefill lies whatever the caller did.
        begun = self._last_end if phase is self.phases[DECODE] and self._last_end else self._started
        phase.seconds += ended - begun
        self._last_end = ended

    def add_times(self, layer: int, pack_s: float, wait_s: float, combine_s: float) -> None:
        """Adds the host seconds of one call of the dispatcher."""
        phase = self._phase
        phase.pack_s += pack_s
        phase.wait_s += wait_s
        phase.combine_s += combine_s
        if self._phase_layers:
            times = self._phase_layers[layer]
            times.calls += 1
            times.pack_s += pack_s
            times.wait_s += wait_s
            times.combine_s += combine_s
