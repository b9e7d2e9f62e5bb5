"""What a client asks of the engine, and what the engine tells while it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

MAX_ALTERNATIVES: Final = 20
"""Log probabilities of at most so many tokens are given at each position, as in OpenAI's API."""


class FinishReason(StrEnum):
    """Why an answer ended, in OpenAI's words; CANCELLED and ERROR are ours."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen. Temperature 0 is greedy.

    ``top_k`` 0 and ``top_p`` 1 leave all tokens in. The same ``seed`` gives the same tokens, whatever else runs; None
    takes a fresh one. ``alternatives``: None for no log probabilities, else how many besides the chosen token's;
    ``with_prompt``: also those of the prompt. ``max_tokens`` 0 computes the prompt only.
    ``bias`` is added to the logits of tokens. ``matcher``: what the answer must be, see `GrammarCompiler.compile`.
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
    """Something happened to a request: a token, its end, or both. ``error`` says what failed; ``reused_tokens`` is how
    many tokens of the prompt were taken from the cache; ``prompt`` are its tokens, once, if they were asked for."""

    choice: TokenChoice | None = None
    finish: FinishReason | None = None
    error: Exception | None = None
    reused_tokens: int = 0
    prompt: tuple[TokenChoice, ...] = ()


OnProgress = Callable[[Progress], None]
"""Called from the engine's thread, in order, until one with ``finish`` has come; must not block."""
