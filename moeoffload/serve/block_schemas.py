"""Requests of Anthropic's messages and OpenAI's responses, each translated to the equivalent chat request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from moeoffload.serve.api_errors import bad_request, unsupported
from moeoffload.serve.schemas import ChatRequest, StrictModel, read_content

_TEXTS: Final = ("text", "input_text", "output_text", "reasoning_text")
_REASONING: Final = ("effort", "summary", "generate_summary")
"""No summary is written: the reasoning itself is returned, whole."""
_TEXT: Final = ("format", "verbosity")
_THOUGHT: Final = {"role", "content", "reasoning_content"}  # of a message that is nothing but reasoning so far

Blocks = str | list[dict[str, Any]]


class Turn(StrictModel):
    """A message of Anthropic's API."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class _Asked(StrictModel):
    model: str
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None

    def _chat(self, **fields: Any) -> ChatRequest:
        self.check_unknown()
        told = {name: getattr(self, name) for name in ("model", "stream", "temperature", "top_p")} | fields
        try:
            return ChatRequest.model_validate({name: value for name, value in told.items() if value is not None})
        except ValidationError as error:
            first = error.errors()[0]
            param = ".".join(str(part) for part in first["loc"])
            raise bad_request(f"Invalid '{param}': {first['msg']}.", param) from None


class CountTokensRequest(_Asked):
    """The body of /v1/messages/count_tokens: that of /v1/messages, of which clients leave ``max_tokens`` out."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: Blocks | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """The equivalent chat request. Raises ApiError: there is none."""
        messages = [{"role": "system", "content": _text(self.system, "system")}] if self.system else []
        for turn in self.messages:
            messages += _turn_messages(turn)
        last = messages[-1] if messages else {}
        choice = self.tool_choice or {}
        named = {"type": "function", "function": {"name": choice.get("name")}}
        choices = {"auto": "auto", "any": "required", "none": "none", "tool": named}
        return self._chat(
            messages=messages,
            continue_final_message=True if last.get("role") == "assistant" and "tool_calls" not in last else None,
            max_tokens=self.max_tokens,
            top_k=self.top_k,
            stop=self.stop_sequences,
            tools=[_anthropic_tool(tool) for tool in self.tools or ()] or None,
            tool_choice=choices.get(str(choice.get("type")), "unknown") if choice else None,
            parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
            chat_template_kwargs={"enable_thinking": self.thinking.get("type") != "disabled"}
            if self.thinking
            else None,
        )


class MessagesRequest(CountTokensRequest):
    """The body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]


def _anthropic_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise unsupported("tools", f"of type {str(tool['type'])[:50]}")
    told = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": {name: value for name, value in told.items() if value is not None}}


def _text(blocks: Any, param: str) -> str:
    try:
        return read_content(blocks, kinds=_TEXTS)
    except ValueError as error:
        raise bad_request(f"Invalid '{param}': {error}.", param) from None


def _turn_messages(turn: Turn) -> Iterator[dict[str, Any]]:
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    kinds: dict[str, list[dict[str, Any]]] = {}
    for block in turn.content:
        kinds.setdefault(str(block.get("type")), []).append(block)
    for result in kinds.pop("tool_result", ()):
        content = _text(result.get("content") or "", "messages")
        yield {"role": "tool", "tool_call_id": result.get("tool_use_id"), "content": content}
    calls = [_call(each.get("id"), each.get("name"), each.get("input")) for each in kinds.pop("tool_use", ())]
    thought = "".join(str(each.get("thinking", "")) for each in kinds.pop("thinking", ()))
    rest = [block for blocks in kinds.values() for block in blocks]
    if rest or calls or thought:
        told: dict[str, Any] = {"role": turn.role, "content": _text(rest, "messages")}
        yield told | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thought} if thought else {})


def _call(id_: Any, name: Any, arguments: Any) -> dict[str, Any]:
    given = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": given}}


class ResponsesRequest(_Asked):
    """The body of /v1/responses."""

    input: Annotated[Blocks, Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None

    def repeated(self) -> dict[str, Any]:
        """The fields of the request that the response repeats. Raises ApiError: a response cannot hold them."""
        told = {name: getattr(self, name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")}
        choice = self.tool_choice or "auto"
        parallel = self.parallel_tool_calls is not False
        told |= {"tools": self.tools or [], "tool_choice": choice, "parallel_tool_calls": parallel}
        told["reasoning"] = {"effort": (self.reasoning or {}).get("effort"), "summary": None}
        try:
            json.dumps(told, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:  # Python's parser takes NaN and half of a surrogate pair
            raise bad_request(
                "Invalid 'tools': a number that JSON does not have, or no valid Unicode.", "tools"
            ) from None
        return told

    def chat(self) -> ChatRequest:
        """The equivalent chat request. Raises ApiError: there is none."""
        for param, fields, known in (("reasoning", self.reasoning, _REASONING), ("text", self.text, _TEXT)):
            for name in (name for name, value in (fields or {}).items() if value is not None and name not in known):
                raise unsupported(f"{param}.{name}")
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items: Any = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for item in items:
            _add_item(messages, item)
        form = (self.text or {}).get("format") or {}
        if not isinstance(form, dict):
            raise bad_request("Invalid 'text.format': it is no object.", "text.format")
        if form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {key: form[key] for key in form if key != "type"}}
        choice: Any = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
        return self._chat(
            messages=messages,
            max_tokens=self.max_output_tokens,
            tools=[_flat_tool(tool) for tool in self.tools or ()] or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=form or None,
            reasoning_effort=(self.reasoning or {}).get("effort"),
            verbosity=(self.text or {}).get("verbosity"),
        )


def _flat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": tool.get("type"), "function": {name: value for name, value in tool.items() if name != "type"}}


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        message = {"role": item.get("role"), "content": _text(item.get("content") or "", "input")}
        # What an answer says after its reasoning belongs to the same turn.
        is_rest = message["role"] == "assistant" and messages and messages[-1].keys() == _THOUGHT
        messages.append((messages.pop() if is_rest else {}) | message)
    elif kind == "function_call":
        call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _text(item.get("output") or "", "input")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "reasoning":
        if isinstance(item.get("content"), str):
            raise bad_request("Invalid 'input': the content of reasoning is an array.", "input")
        thought = _text(item.get("content") or "", "input")
        messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    else:
        raise bad_request(f"Items of type {str(kind)[:50]!r} are not supported.", "input")
