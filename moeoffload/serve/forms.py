"""The JSON of answers, whole and in chunks, in the form of OpenAI's API: chats and completions."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from moeoffload import __version__
from moeoffload.host.detokenizer import TokenTexts
from moeoffload.serve.answer_parser import ToolCall
from moeoffload.serve.api_errors import ApiError
from moeoffload.serve.choices import Piece
from moeoffload.serve.request import TokenChoice

_LEAST_LOGPROB: Final = -9999.0  # stands for minus infinity, which JSON does not have

Json = dict[str, Any]


class Form(ABC):
    """The JSON of one answer: whole, or in the chunks of a stream."""

    has_names: ClassVar[bool] = False  # whether chunks are events with names

    @abstractmethod
    def opening(self, n_choices: int, usage: Json) -> list[Json]:
        """The chunks at the start of a stream; of ``usage`` only the prompts are known."""

    @abstractmethod
    def chunks(self, piece: Piece) -> list[Json]:
        """The chunks for one piece."""

    @abstractmethod
    def closing(self, usage: Json) -> list[Json]:
        """The chunks at the end of a stream."""

    @abstractmethod
    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Json) -> Json:
        """The whole answer; ``pieces`` are by choice."""

    def error(self, error: ApiError) -> Json:
        """What a stream says last instead of an answer."""
        return error.body()


@dataclass
class _ChoicesForm(Form):
    """An answer as a list of choices. ``alternatives``: how many are listed for each token; None for no log
    probabilities."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    model: str
    texts: TokenTexts
    alternatives: int | None
    with_usage: bool

    def __post_init__(self) -> None:
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": f"moeoffload-{__version__}",
        }

    def closing(self, usage: Json) -> list[Json]:
        """See `Form`: the token counts, if requested."""
        return [self._chunk([], usage)] if self.with_usage else []

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Json) -> Json:
        """See `Form`."""
        choices = [self._whole(index, mine) for index, mine in enumerate(pieces)]
        return self._head | {"object": self.kind, "choices": choices, "usage": usage}

    @abstractmethod
    def _whole(self, index: int, pieces: Sequence[Piece]) -> Json:
        """One choice."""

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        with_usage: Json = {"usage": usage} if self.with_usage else {}
        return self._head | {"object": self.chunk_kind, "choices": choices} | with_usage


@dataclass
class ChatForm(_ChoicesForm):
    """Chat completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    n_calls: Counter[int] = field(default_factory=Counter)  # by choice

    def opening(self, n_choices: int, usage: Json) -> list[Json]:
        """See `Form`."""
        return [self._delta(index, {"role": "assistant", "content": ""}) for index in range(n_choices)]

    def chunks(self, piece: Piece) -> list[Json]:
        """See `Form`."""
        logprobs = self._logprobs([piece]) if piece.tokens else None
        deltas = self._deltas(piece) or ([{"content": ""}] if logprobs else [])
        chunks = [self._delta(piece.index, delta, None if i else logprobs) for i, delta in enumerate(deltas)]
        if piece.finish is not None:
            chunks.append(self._delta(piece.index, {}, finish=piece.finish))
        return chunks

    def _whole(self, index: int, pieces: Sequence[Piece]) -> Json:
        parts = [part for piece in pieces for part in piece.parts]
        calls = [_call_json(part.call) for part in parts if part.call is not None]
        text, thought = ("".join(getattr(part, kind) for part in parts) for kind in ("content", "reasoning"))
        message: Json = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(pieces),
            "finish_reason": pieces[-1].finish,
        }

    def _deltas(self, piece: Piece) -> list[Json]:
        deltas: list[Json] = []
        for part in piece.parts:
            if part.call is not None:
                deltas.append({"tool_calls": [{"index": self.n_calls[piece.index]} | _call_json(part.call)]})
                self.n_calls[piece.index] += 1
            elif part.reasoning:
                deltas.append({"reasoning_content": part.reasoning})
            else:
                deltas.append({"content": part.content})
        return deltas

    def _delta(self, index: int, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
        return self._chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}])

    def _logprobs(self, pieces: Sequence[Piece]) -> Json | None:
        if self.alternatives is None:
            return None
        content = [self._token(choice) for piece in pieces for _, choice in piece.tokens]
        return {"content": content, "refusal": None}

    def _token(self, choice: TokenChoice) -> Json:
        best = [self._named(*pair) for pair in choice.alternatives[: self.alternatives]]
        return self._named(choice.token, choice.logprob) | {"top_logprobs": best}

    def _named(self, token: int, logprob: float | None) -> Json:
        text, parts = self.texts.of(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": parts}


@dataclass
class CompletionForm(_ChoicesForm):
    """Text completions. ``echoes``: the text before each choice; log probabilities then include its tokens."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    echoes: Sequence[str]

    def opening(self, n_choices: int, usage: Json) -> list[Json]:
        """See `Form`."""
        if self.alternatives is not None:
            return []  # the first piece contains the prompt and its tokens
        return [self._chunk([self._choice(index, text, [])]) for index, text in enumerate(self.echoes) if text]

    def chunks(self, piece: Piece) -> list[Json]:
        """See `Form`."""
        echo = self.echoes[piece.index] if piece.prompt else ""
        return [self._chunk([self._choice(piece.index, echo + piece.text, [piece])])]

    def _whole(self, index: int, pieces: Sequence[Piece]) -> Json:
        return self._choice(index, self.echoes[index] + "".join(piece.text for piece in pieces), pieces)

    def _choice(self, index: int, text: str, pieces: Sequence[Piece]) -> Json:
        finish = pieces[-1].finish if pieces else None
        return {"index": index, "text": text, "logprobs": self._logprobs(index, pieces), "finish_reason": finish}

    def _logprobs(self, index: int, pieces: Sequence[Piece]) -> Json | None:
        if self.alternatives is None:
            return None
        echo = self.echoes[index]
        tokens = self._of_prompt(pieces[0].prompt, echo) if pieces else []
        first = 1 if tokens else 0  # the first token has no probability
        tokens += [(len(echo) + start, choice) for piece in pieces for start, choice in piece.tokens]
        return {
            "tokens": [self.texts.of(choice.token)[0] for _, choice in tokens],
            "token_logprobs": [None] * first + [_finite(choice.logprob) for _, choice in tokens[first:]],
            "top_logprobs": [None] * first + [self._best(choice) for _, choice in tokens[first:]]
            if self.alternatives
            else None,
            "text_offset": [start for start, _ in tokens],
        }

    def _of_prompt(self, choices: Sequence[TokenChoice], echo: str) -> list[tuple[int, TokenChoice]]:
        """Each token with the offset of its text; parts of a character have the offset of the character."""
        n_begun, n_echo, tokens = 0, len(echo), []
        for choice in choices:
            text, parts = self.texts.of(choice.token)
            if choice.token in self.texts.special and not echo.startswith(text, n_begun):
                text, parts = "", None  # added by the tokenizer, as a BOS token is
            begins = [part & 0xC0 != 0x80 for part in parts or text.encode()]  # whether a byte begins a character
            inside = not all(begins[:1])
            tokens.append((min(max(0, n_begun - inside), n_echo), choice))
            n_begun += sum(begins)
        return tokens

    def _best(self, choice: TokenChoice) -> dict[str, float]:
        """The most likely tokens, and the chosen one."""
        pairs = [*choice.alternatives[: self.alternatives], (choice.token, choice.logprob)]
        return {self.texts.of(token)[0]: _finite(logprob) for token, logprob in pairs}


def _call_json(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finite(logprob: float | None) -> float:
    return _LEAST_LOGPROB if logprob is None else max(logprob, _LEAST_LOGPROB)
