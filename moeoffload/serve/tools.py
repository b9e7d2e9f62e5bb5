"""Tools of a request: what is asked for of them, and the grammar of calls that are forced."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from moeoffload.serve.api_errors import bad_request, unsupported
from moeoffload.serve.grammar import Grammar

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 16  # forced ones of an answer


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Function(_Strict):
    """What a tool is called, what it does, and the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FunctionTool(_Strict):
    """A tool, described as OpenAI does."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]


def forced_tools(tools: list[FunctionTool] | None, choice: Any) -> list[Function]:
    """Those of which one must be called; none if the model may choose. Raises ApiError: there is no such choice."""
    functions = [tool.function for tool in tools or ()]
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        if not functions:
            raise bad_request("'tool_choice' required needs 'tools'.", "tool_choice")
        return functions
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise unsupported("tool_choice", "only 'auto', 'none', 'required' and a function are")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    named = [each for each in functions if each.name == name]
    if not named:
        raise bad_request("'tool_choice' names none of the 'tools'.", "tool_choice")
    return named[:1]


def calls_grammar(functions: list[Function], parallel: bool) -> Grammar:
    """An array of calls of ``functions``, of one call if not ``parallel``: what `ForcedCalls` takes."""
    parts: list[Any] = []
    calls = []
    for number, function in enumerate(functions):
        schema = {"type": "object", **(function.parameters or {"additionalProperties": False})}
        parts.append({"name": f"arguments{number}", "json_schema": schema})
        head = json.dumps('{"name": ' + json.dumps(function.name) + ', "arguments": ')
        calls.append(f'{head} @arguments{number} "}}"')
    more = f'(", " call){{0,{MAX_CALLS - 1}}}' if parallel else ""
    parts.insert(0, {"name": "calls", "lark_grammar": f'start: "[" call {more} "]"\ncall: {" | ".join(calls)}'})
    return Grammar.of_parts(parts, "tools")
