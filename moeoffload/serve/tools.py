"""Tools of a request: the tool choice, and the grammar of forced calls."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from moeoffload.serve.api_errors import bad_request, unsupported
from moeoffload.serve.grammar import Grammar

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 16  # the maximum number of forced calls of an answer


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Function(_Strict):
    """A tool's name, description, and the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FunctionTool(_Strict):
    """A tool in OpenAI's form."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]


def forced_tools(tools: list[FunctionTool] | None, choice: Any) -> list[Function]:
    """The functions of which one must be called; empty if the model may choose. Raises ApiError: invalid choice."""
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
    """The grammar of an array of calls of ``functions``, of one call unless ``parallel``; `ForcedCalls` parses it."""
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
