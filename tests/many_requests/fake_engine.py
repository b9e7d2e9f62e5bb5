"""An engine without a model: says what a test tells it to, when the test says so."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from moeoffload.errors import BusyError
from moeoffload.serve.request import FinishReason, OnProgress, Progress, SamplingOptions, TokenChoice

EOS = 256
"""Of the demo checkpoint, whose other tokens are bytes."""


def tokens_of(text: str) -> list[int]:
    return [*text.encode(), EOS]


@dataclass
class FakeTicket:
    """A request; `events` are what has been told of it."""

    request_id: str
    prompt: list[int]
    options: SamplingOptions
    on_progress: OnProgress
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: bool = False

    def tell(self, progress: Progress) -> None:
        self.ended = progress.finish is not None
        self.on_progress(progress)


class FakeEngine:
    """Does what `ServingEngine` does for the HTTP server. While `held`, requests stay, as long ones do."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.context_tokens, self.n_vocabulary, self.eos = 200, 258, (EOS,)
        self.sampling_defaults: dict[str, float] = {}
        self.n_refused = 0
        self.is_ready = True
        self.failure: BaseException | None = None
        self.tokens = list(tokens)
        self.error: Exception | None = None
        """Told after the tokens, instead of an end."""
        self.room = 1000
        self.reused_tokens = 0
        self.held = False
        self.tickets: list[FakeTicket] = []
        self._numbers = itertools.count()

    def note_refused(self) -> None:
        self.n_refused += 1

    def submit(self, prompt: list[int], options: SamplingOptions, on_progress: OnProgress) -> FakeTicket:
        if len(self.tickets) >= self.room:
            raise BusyError("the queue is full", 3.2)
        ticket = FakeTicket(f"r{next(self._numbers)}", prompt, options, on_progress)
        self.tickets.append(ticket)
        threading.Thread(target=self._answer, args=(ticket,), daemon=True).start()
        return ticket

    def cancel(self, ticket: FakeTicket, *, complete: bool = False) -> None:
        ticket.cancelled.set()

    def drain(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not all(ticket.ended for ticket in self.tickets):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _answer(self, ticket: FakeTicket) -> None:
        options = ticket.options
        if options.with_prompt:
            ticket.tell(Progress(prompt=tuple(TokenChoice(token, -0.5) for token in ticket.prompt)))
        for number, token in enumerate(self.tokens):
            if ticket.cancelled.is_set():
                break
            finish = FinishReason.STOP if token == EOS and not options.ignore_eos else None
            if finish is None and number + 1 == options.max_tokens:
                finish = FinishReason.LENGTH
            ticket.tell(Progress(self._choice(token, options), finish, reused_tokens=self.reused_tokens))
            if finish is not None:
                return
        while self.held and not ticket.cancelled.wait(0.01):
            pass
        if ticket.cancelled.is_set():
            ticket.tell(Progress(finish=FinishReason.CANCELLED))
        elif self.error is not None:
            ticket.tell(Progress(finish=FinishReason.ERROR, error=self.error))
        else:
            ticket.tell(Progress(finish=FinishReason.LENGTH))

    @staticmethod
    def _choice(token: int, options: SamplingOptions) -> TokenChoice:
        if options.alternatives is None:
            return TokenChoice(token)
        others = tuple((other, -float(other)) for other in range(1, options.alternatives + 1))
        return TokenChoice(token, -0.5, others)
