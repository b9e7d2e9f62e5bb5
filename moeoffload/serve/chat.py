"""From requests to prompt tokens (chat templates, tools, plain text), in a separate thread."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

import jinja2

from moeoffload.serve.answer_parser import AnswerParser, ForcedCalls, TemplateParser
from moeoffload.serve.api_errors import bad_request
from moeoffload.serve.grammar import Grammar, GrammarCompiler
from moeoffload.serve.response_formats import AnswerFormat
from moeoffload.serve.schemas import ChatRequest, CompletionRequest, Function

_MAX_CALLS: Final = 16  # the maximum number of forced calls of an answer


@dataclass(frozen=True)
class Prompt:
    """The prompt's tokens, and how answers are parsed. ``matcher``: see `GrammarCompiler`; ``parser`` makes one per
    choice; ``with_marks``: whether special tokens stay in its text; ``one_call``: whether a call ends the answer."""

    tokens: list[int]
    matcher: Any = None
    parser: Callable[[], AnswerParser] = AnswerParser
    with_marks: bool = False
    one_call: bool = False


class PromptReader:
    """Turns requests into tokens in a thread, because a long prompt would block the event loop.

    There is one thread with its own tokenizer: tokenizers must not be used from several threads at a time.
    """

    def __init__(self, tokenizer: Any, n_vocabulary: int, eos: Sequence[int]) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}
        self._grammars = GrammarCompiler(self._tokenizer, n_vocabulary, eos)
        self._format = AnswerFormat(tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """Stops the thread after its current task; waiting tasks are cancelled."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read_completion(self, request: CompletionRequest) -> list[Prompt]:
        """The prompts of a completion. Raises ApiError: one is not valid Unicode, or the grammar is invalid."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read_completion, request)

    async def read_chat(self, request: ChatRequest) -> Prompt:
        """The prompt from the model's chat template, up to where the assistant's answer begins.
        Raises ApiError: there is no template, it does not accept these messages or tools, or the grammar is invalid."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read_chat, request)

    def _read_completion(self, request: CompletionRequest) -> list[Prompt]:
        matcher = self._grammars.compile(request.grammar())
        texts = (self._encode(each, special=True) if isinstance(each, str) else each for each in request.prompt)
        return [Prompt(tokens, matcher) for tokens in texts]

    def _read_chat(self, request: ChatRequest) -> Prompt:
        forced = request.forced_functions()
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        if request.tool_choice == "none":
            tools = []
        text = self._render(request, tools, bool(forced))
        one_call = request.parallel_tool_calls is False or isinstance(request.tool_choice, dict)
        grammar = _calls_grammar(forced, not one_call) if forced else request.grammar()
        if grammar is not None:
            grammar = replace(grammar, opening=self._format.opening(text))
        template = self._format.template(text, bool(tools) and not forced)

        def parser() -> AnswerParser:
            inner = ForcedCalls() if forced else AnswerParser()
            return TemplateParser(*template, tools, inner) if template is not None else inner

        matcher, tokens = self._grammars.compile(grammar), self._encode(text, special=False)
        return Prompt(tokens, matcher, parser, template is not None, bool(tools) and one_call)

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise bad_request("The text is no valid Unicode: it has half of a surrogate pair.") from None
        tokens: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return tokens

    def _render(self, request: ChatRequest, tools: list[Any], forced: bool) -> str:
        options: dict[str, Any] = dict(request.chat_template_kwargs or {})
        if taken := self._reserved.intersection(options):
            raise bad_request(f"Invalid 'chat_template_kwargs': {sorted(taken)[0]!r} is not for clients to set.")
        if request.reasoning_effort is not None:
            options["reasoning_effort"] = request.reasoning_effort
        if not self._takes_tools(tools):
            if not forced:
                raise bad_request("The model's chat template takes no tools.", "tools", "unsupported_parameter")
            tools = []  # the grammar enforces calls of them
        options |= {"tools": tools or None, "tokenize": False}
        options["continue_final_message" if request.continue_final_message else "add_generation_prompt"] = True
        try:
            try:
                text: str = self._tokenizer.apply_chat_template(self._messages(request), **options)
            except TypeError:  # DeepSeek's template joins the arguments of calls to text
                text = self._tokenizer.apply_chat_template(self._messages(request, written=True), **options)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise bad_request(f"The model's chat template does not take these messages: {error}", "messages") from None
        return text

    @staticmethod
    def _messages(request: ChatRequest, *, written: bool = False) -> list[dict[str, Any]]:
        """The messages as most templates take them: without a developer's role, and the arguments of calls as objects,
        or ``written`` as JSON."""
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"
            for call in message.get("tool_calls", ()):
                function = call.get("function")
                arguments = function.get("arguments") if isinstance(function, dict) else None
                if isinstance(arguments, str):
                    given = _read_arguments(arguments)
                    function["arguments"] = arguments if written else given
        return messages

    def _takes_tools(self, tools: list[Any]) -> bool:
        try:
            template = self._tokenizer.get_chat_template(tools=tools or None)
        except ValueError:
            raise bad_request("The model has no chat template; use /v1/completions.") from None
        return not tools or re.search(r"\btools\b", template) is not None


def _read_arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise bad_request("Invalid 'messages': arguments of a tool call are no JSON.", "messages") from None


def _calls_grammar(functions: list[Function], parallel: bool) -> Grammar:
    """The grammar of an array of calls of ``functions``, of one call unless ``parallel``; `ForcedCalls` parses it."""
    parts: list[Any] = []
    calls = []
    for number, function in enumerate(functions):
        schema = {"type": "object", **(function.parameters or {"additionalProperties": False})}
        parts.append({"name": f"arguments{number}", "json_schema": schema})
        head = json.dumps('{"name": ' + json.dumps(function.name) + ', "arguments": ')
        calls.append(f'{head} @arguments{number} "}}"')
    more = f'(", " call){{0,{_MAX_CALLS - 1}}}' if parallel else ""
    parts.insert(0, {"name": "calls", "lark_grammar": f'start: "[" call {more} "]"\ncall: {" | ".join(calls)}'})
    return Grammar.of("parts", parts, "tools")
