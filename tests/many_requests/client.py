"""Many clients of a `ServingEngine`, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moeoffload.config import ServeSettings
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.request import FinishReason, Progress, SamplingOptions

TIMEOUT_S = 120


def limits(**settings: Any) -> ServeSettings:
    """Settings of an engine for small tests."""
    return ServeSettings(**{"kv_gib": 0.02} | settings)


@dataclass
class Answer:
    """What has come of one request."""

    tokens: list[int] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    cancel: Callable[[], None] = lambda: None

    def take(self, progress: Progress) -> None:
        assert not self.over.is_set(), "nothing comes after the end"
        self.progress.append(progress)
        if progress.choice is not None:
            self.tokens.append(progress.choice.token)
        if progress.finish is not None:
            self.over.set()

    @property
    def finish(self) -> FinishReason | None:
        assert self.over.wait(TIMEOUT_S), "no end"
        return self.progress[-1].finish


def ask(engine: ServingEngine, prompt: list[int], max_tokens: int = 24, **options: Any) -> Answer:
    """Submits a request; greedy unless told otherwise."""
    answer = Answer()
    options.setdefault("temperature", 0.0)
    request = engine.submit(prompt, SamplingOptions(max_tokens=max_tokens, **options), answer.take)
    answer.cancel = lambda: engine.cancel(request)
    return answer


def whole(engine: ServingEngine, prompt: list[int], max_tokens: int = 24, **options: Any) -> Answer:
    """Waits for an answer of ``max_tokens`` tokens."""
    answer = ask(engine, prompt, max_tokens, ignore_eos=True, **options)
    assert answer.finish is FinishReason.LENGTH
    return answer
