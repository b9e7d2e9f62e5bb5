"""Incremental parsing of an answer's text into reasoning, content and tool calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from transformers.utils.chat_parsing import ResponseParser

_REASONING: Final = ("reasoning_content", "thinking")
_NO_LETTERS: Final = " \n\r\t"
_MALFORMED: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What a template may raise for a text that is not as it expects."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call by the model; ``arguments`` is JSON. Mistral's templates take ids of this form only."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])


@dataclass(frozen=True)
class Part:
    """New output: text of the content, text of the reasoning, or a whole call."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None


class AnswerParser:
    """Parses a text that arrives in pieces; the parts do not depend on how it is split."""

    def push(self, text: str) -> list[Part]:
        """Takes the next piece and returns the parts that are certain now."""
        return [Part(content=text)] if text else []

    def finish(self) -> list[Part]:
        """Returns the remaining parts when the text has ended."""
        return []


class ForcedCalls(AnswerParser):
    """Parses the array of calls that the grammar of forced tools produces. A call that is cut, or has numbers that are
    no JSON, becomes content."""

    def __init__(self) -> None:
        self._text = ""
        self._decoder = json.JSONDecoder()

    def push(self, text: str) -> list[Part]:
        """See `AnswerParser`."""
        self._text += text
        parts: list[Part] = []
        while (start := self._text.find("{")) >= 0:
            try:
                call, end = self._decoder.raw_decode(self._text, start)
            except (ValueError, RecursionError):
                break
            parts += _calls(call) or [Part(content=self._text[start:end])]
            self._text = self._text[end:]
        return parts

    def finish(self) -> list[Part]:
        """See `AnswerParser`."""
        start = self._text.find("{")
        return [Part(content=self._text[start:])] if start >= 0 else []


class TemplateParser(AnswerParser):
    """Parses with a response template of transformers. A malformed call stays in the content as written."""

    def __init__(self, template: dict[str, Any], prompt: str, tools: Sequence[Any], inner: AnswerParser) -> None:
        """``inner`` parses the content, which may contain calls itself."""
        self._parser = ResponseParser(template, prompt, tools=list(tools) or None)
        self._inner = inner
        self._body = ""  # text of a call that has not ended
        self._blank = ""  # trailing white space of reasoning, kept until more reasoning follows
        self._has_reasoning = False
        self._strips = bool(self._parser.initial_events)  # whether content follows something else
        self._failed = False

    def push(self, text: str) -> list[Part]:
        """See `AnswerParser`."""
        if self._failed:
            return self._inner.push(text)
        try:
            events = self._parser.feed(text)
        except _MALFORMED:
            self._failed = True
            return self._inner.push(self._body + text)
        return self._parts(events)

    def finish(self) -> list[Part]:
        """See `AnswerParser`."""
        try:
            events = [] if self._failed else self._parser.finalize()[1]
        except _MALFORMED:
            return [*self._inner.push(self._body), *self._inner.finish()]
        return [*self._parts(events), *self._inner.finish()]

    def _parts(self, events: Sequence[dict[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            name, kind = event["field"], event["type"]
            if kind == "region_chunk":
                parts += self._chunk(name, event["text"])
            elif kind == "region_close" and name == "tool_calls":
                self._strips = True
                parts += _calls(event["value"]) or self._inner.push(self._body)
                self._body = ""
        return parts

    def _chunk(self, name: str, text: str) -> list[Part]:
        if name == "tool_calls":
            self._body += text
        elif name in _REASONING:
            text = self._blank + text
            if not self._has_reasoning:
                text = text.lstrip(_NO_LETTERS)
            told = text.rstrip(_NO_LETTERS)
            self._blank = text[len(told) :]
            self._has_reasoning = self._has_reasoning or bool(told)
            self._strips = True
            return [Part(reasoning=told)] if told else []
        elif name == "content":
            if self._strips:
                text = text.lstrip(_NO_LETTERS)
            self._strips = self._strips and not text
            return self._inner.push(text)
        return []


def _calls(value: Any) -> list[Part]:
    """The calls in a value that a template has parsed; none if it is malformed."""
    found: list[Part] = []
    for each in value if isinstance(value, list) else [value]:
        call = each.get("function", each) if isinstance(each, dict) else each
        if isinstance(call, list):
            found += _calls(call)
            continue
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            return []
        try:
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            own = {"id": each["id"]} if isinstance(each.get("id"), str) else {}
            (name + written + own.get("id", "")).encode()
        # Python reads numbers beyond all floats as infinite, and an escaped half of a surrogate pair as it is.
        except (ValueError, RecursionError):
            return []
        found.append(Part(call=ToolCall(name.strip(), written, **own)))
    return found
