"""The choices of one HTTP request: each is a request to the engine, whose tokens become pieces of text.

The engine's thread passes progress to the event loop; everything else runs in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from moeoffload.errors import BusyError
from moeoffload.host.detokenizer import Detokenizer, StopStrings
from moeoffload.serve.answer_parser import AnswerParser, Part
from moeoffload.serve.api_errors import ApiError, of_exception, unavailable
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.request import FinishReason, Progress, SamplingOptions, TokenChoice
from moeoffload.serve.sequence import Sequence as Request


@dataclass(frozen=True)
class Piece:
    """New output of one choice: text, its parsed parts, its tokens, and at the end the finish reason."""

    index: int
    text: str
    tokens: Sequence[tuple[int, TokenChoice]] = ()  # each with the offset of its text, in characters of the choice
    finish: FinishReason | None = None
    parts: Sequence[Part] = ()
    prompt: Sequence[TokenChoice] = ()  # the prompt's tokens, in the first piece, if requested
    stop: str = ""  # the stop string that ended it


@dataclass
class Choice:
    """One choice while it is generated."""

    index: int
    detokenizer: Detokenizer
    stops: StopStrings
    parser: AnswerParser
    one_call: bool = False  # whether the answer ends with its first tool call
    shows_end: bool = False  # whether the token that ends it is listed with the others
    request: Request = field(init=False)  # the engine's, once it was submitted
    n_calls: int = 0
    n_tokens: int = 0
    reused_tokens: int = 0
    ended: bool = False
    _prompt: Sequence[TokenChoice] = ()
    _decoded: int = 0
    _released: int = 0
    _waiting: deque[tuple[int, TokenChoice]] = field(default_factory=deque)
    """Tokens whose text is held back because it may be part of a stop string, with the offset of their text."""

    def take(self, progress: Progress) -> Piece | None:
        """Takes ``progress`` and returns the next piece; None if nothing can be sent yet."""
        self.reused_tokens = max(self.reused_tokens, progress.reused_tokens)
        self._prompt = progress.prompt or self._prompt
        text = ""
        if progress.choice is not None:
            self.n_tokens += 1
            # The token that ends an answer is not part of its text.
            if progress.finish is not FinishReason.STOP or self.shows_end:
                self._waiting.append((self._decoded, progress.choice))
            if progress.finish is not FinishReason.STOP:
                text = self._add(self.detokenizer.push(progress.choice.token))
        finish = progress.finish
        if finish is not None and not self.stops.found:
            text += self._add(self.detokenizer.finish())
            text += self.stops.finish()
        if self.stops.found:
            finish = FinishReason.STOP
        parts = [*self.parser.push(text), *(self.parser.finish() if finish is not None else ())]
        if self.one_call and any(part.call for part in parts):
            parts = parts[: 1 + next(number for number, part in enumerate(parts) if part.call)]
            finish = FinishReason.STOP
        self.n_calls += sum(part.call is not None for part in parts)
        if finish is FinishReason.STOP and self.n_calls:
            finish = FinishReason.TOOL_CALLS
        self.ended = finish is not None
        return self._release(text, finish, parts) if text or finish is not None else None

    def _add(self, piece: str) -> str:
        self._decoded += len(piece)
        return self.stops.push(piece)

    def _release(self, text: str, finish: FinishReason | None, parts: Sequence[Part]) -> Piece:
        self._released += len(text)
        tokens = []
        # All tokens that begin before the end of the released text; at the end all, unless a stop string was found.
        while self._waiting and (self._waiting[0][0] < self._released or (finish and not self.stops.found)):
            tokens.append(self._waiting.popleft())
        prompt, self._prompt = self._prompt, ()
        return Piece(self.index, text, tokens, finish, parts, prompt, self.stops.found)


class Choices:
    """Several requests as one stream of pieces. Must be closed."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[tuple[Choice, Progress] | ApiError] = asyncio.Queue()
        self.choices: list[Choice] = []

    def submit(self, prompt: list[int], options: SamplingOptions, choice: Choice) -> None:
        """Submits one more choice to the engine, with the next index. Raises ApiError: the engine refuses it."""
        try:
            choice.request = self._engine.submit(prompt, options, partial(self._on_progress, choice))
        except Exception as error:  # a failing engine fails one request, not the server
            raise of_exception(error) from error
        self.choices.append(choice)

    def close(self) -> None:
        """Cancels choices that still run. Idempotent."""
        for choice in self.choices:
            if not choice.ended:
                self._engine.cancel(choice.request)

    def give_up(self, error: ApiError) -> None:
        """Ends the stream of pieces with ``error``; call it in the event loop."""
        self._news.put_nowait(error)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields the pieces of all choices as they arrive. Raises ApiError: the engine failed, or after `give_up`."""
        n_running = len(self.choices)
        while n_running:
            news = await self._news.get()
            if isinstance(news, ApiError):
                raise news
            choice, progress = news
            if choice.ended:  # ended by a stop string; the engine does not know yet
                continue
            _check(progress)
            piece = choice.take(progress)
            if choice.ended:
                n_running -= 1
                if progress.finish is None:
                    self._engine.cancel(choice.request, complete=True)
            if piece is not None:
                yield piece

    def _on_progress(self, choice: Choice, progress: Progress) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._news.put_nowait, (choice, progress))


def _check(progress: Progress) -> None:
    if progress.finish is FinishReason.ERROR:
        if isinstance(progress.error, BusyError):  # an expert server is full, which is not this client's fault
            raise unavailable(str(progress.error), progress.error.retry_after_s)
        raise of_exception(progress.error or RuntimeError("the engine told no reason"))
    if progress.finish is FinishReason.CANCELLED:
        raise unavailable("The request was cancelled: the server is stopping.", 1.0)
