"""What hosts generate under faults, and its layers as a clock: a seed strikes at the same place everywhere."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from time import perf_counter
from typing import Any

import tasks
import torch

from moeoffload.host.dispatcher import Dispatcher


def fixed_prompts() -> list[str]:
    """Short ones of all tasks, and one with solved lines before its question, whose prefill is a large call."""
    return [*tasks.prompts(8, seed=3), tasks.long_prompt(300, seed=3)]


def generate(offloaded: Any, prompt: str, **options: Any) -> list[int]:
    """The new tokens of one prompt, greedily; 16 unless ``options`` say otherwise."""
    inputs = offloaded.tokenizer(prompt, return_tensors="pt").to(offloaded.model.device)
    tokens = offloaded.model.generate(**inputs, do_sample=False, **{"max_new_tokens": 16, **options})
    found: list[int] = tokens[0, inputs["input_ids"].shape[1] :].tolist()
    return found


class LayerClock:
    """Ticks with every layer that asks for its experts; calls an action at one of them. ``close`` gives it back."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._before = dispatcher.on_routes
        self._lock = threading.Lock()
        self._at = -1
        self._action: Callable[[], None] | None = None
        self.layer_s = 0.0
        """Seconds that every layer takes longer, as a larger model would."""
        self.ticks: list[float] = []
        self.struck_at: float | None = None
        """perf_counter seconds after the action; None while it has not been called."""
        dispatcher.on_routes = self._tick

    def start(self, at: int = -1, action: Callable[[], None] | None = None) -> None:
        """Forgets the ticks so far; ``action`` is called before the ``at``-th of the next ones goes on."""
        self._at, self._action = at, action
        self.ticks = []
        self.struck_at = None

    def longest_pause(self) -> float:
        """Seconds of the longest time without a tick, from the action (or the start) until now."""
        since = self.ticks[0] if self.struck_at is None else self.struck_at
        moments = [since, *(tick for tick in self.ticks if tick > since), perf_counter()]
        return max(later - earlier for earlier, later in itertools.pairwise(moments))

    def close(self) -> None:
        self._dispatcher.on_routes = self._before

    def _tick(self, layer: int, ids: torch.Tensor) -> None:
        with self._lock:
            strikes = len(self.ticks) == self._at and self._action is not None
            self.ticks.append(perf_counter())
            if strikes and self._action is not None:
                self._action()
                self.struck_at = perf_counter()
        if self.layer_s:
            time.sleep(self.layer_s)
        if self._before is not None:
            self._before(layer, ids)
