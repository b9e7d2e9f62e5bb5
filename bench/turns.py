"""Models that take turns: who takes part, what they do, and how long it takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import torch
from devices import settle
from servers import Spread
from transformers import DynamicCache

from moeoffload import OffloadedModel


@dataclass(frozen=True)
class Contender:
    """A model that takes part; ``offloaded`` is None for the local one."""

    model: Any
    offloaded: OffloadedModel | None = None
    transport: str = "-"
    pipeline: str = "-"


_T = TypeVar("_T")
Task = Callable[[Contender], float]
"""Does something once and says how many seconds it took."""


def prefill(contender: Contender, prompt: torch.Tensor) -> float:
    """Seconds of one forward pass over ``prompt`` with an empty cache."""
    model = contender.model
    prompt = prompt.to(model.device)
    started = perf_counter()
    with torch.inference_mode():
        model(prompt, past_key_values=DynamicCache(config=model.config), use_cache=True, logits_to_keep=1)
    settle(model.device)
    return perf_counter() - started


def decode(contender: Contender, prompt: torch.Tensor, n_tokens: int) -> float:
    """Seconds of ``n_tokens`` greedy tokens after ``prompt``, which is not counted, by the recorder neither."""
    model = contender.model
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        logits = model(prompt.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        settle(model.device)
        if contender.offloaded is not None:
            contender.offloaded.recorder.reset()
        started = perf_counter()
        for _ in range(n_tokens):
            token = logits[:, -1].argmax(-1, keepdim=True)
            logits = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    settle(model.device)
    return perf_counter() - started


def cache_bytes_per_token(model: Any) -> int:
    """Bytes of keys and values of one token, found with a short prompt."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.full((1, 8), 5, device=model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // 8


def take_turns(contenders: Sequence[_T], task: Callable[[_T], float], repeats: int) -> list[list[float]]:
    """Seconds of every contender in every turn; A B C A B C ..., so that drift of the machine meets all alike."""
    for contender in contenders:
        task(contender)
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(repeats):
        for mine, contender in zip(times, contenders, strict=True):
            mine.append(task(contender))
    return times


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Median, least and greatest ratio of one turn: what a machine does to both in one turn does not count."""
    return Spread.of([mine / other for mine, other in zip(ours, theirs, strict=True)])
