"""A request in the engine: its tokens, where their keys and values lie, and whom to tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from moeoffload.host.speculative import Drafter
from moeoffload.serve.request import OnProgress, SamplingOptions
from moeoffload.serve.sampling import Sampler


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of a prompt and of its answer so far."""

    tokens: list[int]
    options: SamplingOptions
    tell: OnProgress
    n_prompt: int = field(init=False)
    sampler: Sampler = field(init=False)

    # for the scheduler
    n_computed: int = 0
    """Tokens whose keys and values are in the cache; a sequence that lost its pages starts again from 0."""
    pages: list[int] = field(default_factory=list)  # the block table: page i holds the tokens from i * page_tokens on
    keys: list[bytes] = field(default_factory=list)
    """What names the beginning up to the end of each full page; see `BlockManager.page_key`."""
    states: Any = None
    """Of layers of linear attention, which hold the computed tokens; see `LinearStates`."""
    first_states: dict[int, Any] = field(default_factory=dict)  # by layer: those with which it starts
    kept_states: dict[int, dict[int, Any]] = field(default_factory=dict)  # by layer: to keep after so many tokens
    drafter: Drafter | None = None
    guesses: list[int] = field(default_factory=list)  # tokens that may follow, for the next step to verify

    # for the engine
    submitted: float = field(default_factory=perf_counter)
    last_token: float = 0.0  # when it was told
    n_told: int = 0  # tokens that the client has
    reused: int | None = None  # tokens of the prompt that the cache had; None until the first step
    is_scheduled: bool = False  # whether it was added to the scheduler
    is_over: bool = False
    is_complete: bool = False  # its client has everything that it needs

    def __post_init__(self) -> None:
        self.n_prompt = len(self.tokens)
        self.sampler = Sampler(self.options, self.tokens)

    @property
    def n_left(self) -> int:
        """Tokens that are still to be computed before the next one can be chosen."""
        return len(self.tokens) - self.n_computed

    @property
    def n_answer(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.n_prompt


@dataclass(frozen=True, slots=True)
class Share:
    """A sequence's part of one step: the next tokens of the prompt, or the last token and guesses behind it.

    ``past`` counts the tokens before these; ``has_token`` is whether a token of the answer comes out, which is not so
    while a prompt has further parts.
    """

    sequence: Sequence
    tokens: list[int]
    past: int
    n_guesses: int
    has_token: bool

    @property
    def end(self) -> int:
        """Tokens of the sequence up to the last of these."""
        return self.past + len(self.tokens)

    @property
    def n_logits(self) -> int:
        """Rows whose logits are needed, which are the last ones."""
        if self.sequence.sampler.prompt_scores is not None:
            return len(self.tokens)
        return 1 + self.n_guesses if self.has_token else 0
