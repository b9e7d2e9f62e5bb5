"""Requests to the engine, and the progress that it reports while it answers them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    """Why an answer ended, in OpenAI's terms; CANCELLED and ERROR are our own."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are sampled. Temperature 0 is greedy.

    ``top_k`` 0 and ``top_p`` 1 keep all tokens. The same ``seed`` gives the same tokens, whatever else runs; None
    picks a new one. ``alternatives``: None for no log probabilities, else how many besides the chosen token's;
    ``with_prompt``: also those of the prompt. ``max_tokens`` 0 computes the prompt only.
    ``bias`` is added to the logits of tokens. ``matcher`` constrains the answer, see `GrammarCompiler.compile`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    alternatives: int | None = None
    with_prompt: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    matcher: Any = None


@dataclass(frozen=True)
class TokenChoice:
    """One token of an answer. ``alternatives``: the most likely tokens and their log probabilities, best first."""

    token: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Progress:
    """An event of a request: a token, its end, or both. ``error`` says what failed; ``reused_tokens`` counts prompt
    tokens from the cache; ``prompt`` has the prompt's tokens, once, if requested."""

    choice: TokenChoice | None = None
    finish: FinishReason | None = None
    error: Exception | None = None
    reused_tokens: int = 0
    prompt: tuple[TokenChoice, ...] = ()


OnProgress = Callable[[Progress], None]
"""Called in the engine's thread, in order, up to the event with ``finish``; must not block."""
