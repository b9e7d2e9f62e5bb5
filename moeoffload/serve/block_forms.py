"""Answers as lists of blocks: Anthropic's messages and OpenAI's responses, whole and as events."""

from __future__ import annotations

import json
import time
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from moeoffload.serve.answer_parser import Part, ToolCall
from moeoffload.serve.api_errors import ApiError
from moeoffload.serve.choices import Piece
from moeoffload.serve.forms import Form, Json
from moeoffload.serve.request import FinishReason

_STOP_REASONS: Final = {FinishReason.LENGTH: "max_tokens", FinishReason.TOOL_CALLS: "tool_use"}
_TEXT_EVENTS: Final = {"call": "function_call_arguments", "reasoning": "reasoning_text", "text": "output_text"}
"""What responses call the text of a block."""


@dataclass
class Block:
    """Content (``text``), ``reasoning``, or a ``call``; the ``number``-th of its answer."""

    number: int
    name: str
    text: str = ""
    call: ToolCall | None = None


class _BlockForm(Form):
    """Base of both forms, for one choice. ``blocks`` are those that have begun; the last may be ``_open``."""

    has_names = True
    prefix: str

    def __init__(self, model: str) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.blocks: list[Block] = []
        self._model = model
        self._open: Block | None = None
        self._finish: FinishReason | None = None
        self._stop = ""  # the stop string that ended it

    def chunks(self, piece: Piece) -> list[Json]:
        """See `Form`."""
        events = [event for part in piece.parts for event in self._take(part)]
        if piece.finish is not None:
            self._finish, self._stop = piece.finish, piece.stop
            events += self._end()
        return events

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Json) -> Json:
        """See `Form`."""
        for piece in pieces[0]:
            self.chunks(piece)
        return self.message(usage)

    def error(self, error: ApiError) -> Json:
        """See `Form`."""
        return {"type": "error"} | error.body()

    @abstractmethod
    def message(self, usage: Json) -> Json:
        """The answer so far."""

    @abstractmethod
    def _begin(self, block: Block) -> list[Json]: ...

    @abstractmethod
    def _delta(self, block: Block, text: str) -> list[Json]: ...

    @abstractmethod
    def _close(self, block: Block) -> list[Json]: ...

    def _take(self, part: Part) -> list[Json]:
        name = "call" if part.call else "reasoning" if part.reasoning else "text"
        text = part.call.arguments if part.call else part.reasoning or part.content
        events: list[Json] = []
        if self._open is None or self._open.name != name or part.call:
            events += self._end()
            self._open = Block(len(self.blocks), name, call=part.call)
            self.blocks.append(self._open)
            events += self._begin(self._open)
        self._open.text += text
        return events + self._delta(self._open, text)

    def _end(self) -> list[Json]:
        ended, self._open = self._open, None
        return self._close(ended) if ended is not None else []


class MessagesForm(_BlockForm):
    """Anthropic's messages."""

    prefix = "msg"

    def error(self, error: ApiError) -> Json:
        """See `Form`."""
        return error.anthropic_body()

    def opening(self, n_choices: int, usage: Json) -> list[Json]:
        """See `Form`."""
        return [{"type": "message_start", "message": self.message(usage)}]

    def closing(self, usage: Json) -> list[Json]:
        """See `Form`."""
        told = self.message(usage)
        delta = {name: told[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": told["usage"]}, {"type": "message_stop"}]

    def message(self, usage: Json) -> Json:
        """See `_BlockForm`."""
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        ended = "stop_sequence" if self._stop else "end_turn"
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [self._json(block, block.text) for block in self.blocks],
            "stop_reason": _STOP_REASONS.get(self._finish, ended) if self._finish else None,
            "stop_sequence": self._stop or None,
            "usage": {
                "input_tokens": usage["prompt_tokens"] - cached,
                "cache_read_input_tokens": cached,
                "output_tokens": usage["completion_tokens"],
            },
        }

    def _json(self, block: Block, text: str) -> Json:
        if block.call is not None:
            given = json.loads(text) if text else {}
            return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": given}
        if block.name == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        return {"type": "text", "text": text}

    def _begin(self, block: Block) -> list[Json]:
        return [{"type": "content_block_start", "index": block.number, "content_block": self._json(block, "")}]

    def _delta(self, block: Block, text: str) -> list[Json]:
        kinds = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
        kind, field = kinds.get(block.name, ("input_json_delta", "partial_json"))
        return [{"type": "content_block_delta", "index": block.number, "delta": {"type": kind, field: text}}]

    def _close(self, block: Block) -> list[Json]:
        return [{"type": "content_block_stop", "index": block.number}]


class ResponsesForm(_BlockForm):
    """OpenAI's responses. ``asked``: the fields of the request that the response repeats."""

    prefix = "resp"

    def __init__(self, model: str, asked: Json) -> None:
        super().__init__(model)
        self._asked = asked
        self._created = time.time()
        self._n_events = 0

    def opening(self, n_choices: int, usage: Json) -> list[Json]:
        """See `Form`."""
        begun = self.message(usage) | {"usage": None}
        return [self._event(f"response.{kind}", response=begun) for kind in ("created", "in_progress")]

    def closing(self, usage: Json) -> list[Json]:
        """See `Form`."""
        told = self.message(usage)
        return [self._event(f"response.{told['status']}", response=told)]

    def message(self, usage: Json) -> Json:
        """See `_BlockForm`."""
        cut = self._finish is FinishReason.LENGTH
        status = "in_progress" if self._finish is None else "incomplete" if cut else "completed"
        return self._asked | {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self._model,
            "output": [self._item(block, "completed") for block in self.blocks],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _item(self, block: Block, status: str) -> Json:
        head = {"id": f"{self.id}_{block.number}", "status": status}
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
            return head | {"type": "function_call"} | call
        parts = [self._part(block, block.text)] if block.text else []
        if block.name == "reasoning":
            return head | {"type": "reasoning", "summary": [], "content": parts}
        return head | {"type": "message", "role": "assistant", "content": parts}

    @staticmethod
    def _part(block: Block, text: str) -> Json:
        if block.name == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1} | fields

    def _of_item(self, block: Block, change: str, status: str) -> Json:
        item = self._item(block, status)
        return self._event(f"response.output_item.{change}", output_index=block.number, item=item)

    def _of_part(self, block: Block, kind: str, **fields: Any) -> Json:
        where: Json = {"output_index": block.number, "item_id": f"{self.id}_{block.number}"}
        if block.call is None:
            where["content_index"] = 0
        return self._event(f"response.{kind}", **where, **fields)

    def _of_text(self, block: Block, change: str, **fields: Any) -> Json:
        logprobs: Json = {"logprobs": []} if block.name == "text" else {}
        return self._of_part(block, f"{_TEXT_EVENTS[block.name]}.{change}", **fields, **logprobs)

    def _begin(self, block: Block) -> list[Json]:
        events = [self._of_item(block, "added", "in_progress")]
        if block.call is None:
            events.append(self._of_part(block, "content_part.added", part=self._part(block, "")))
        return events

    def _delta(self, block: Block, text: str) -> list[Json]:
        return [self._of_text(block, "delta", delta=text)]

    def _close(self, block: Block) -> list[Json]:
        if block.call is not None:
            events = [self._of_text(block, "done", arguments=block.text, name=block.call.name)]
        else:
            events = [self._of_text(block, "done", text=block.text)]
            events.append(self._of_part(block, "content_part.done", part=self._part(block, block.text)))
        return [*events, self._of_item(block, "done", "completed")]
