"""How model families write reasoning and tool calls, as response templates of transformers' `ResponseParser`.

A tokenizer may have its own template (``response_template``); else markers in its chat template identify the family.
"""

from __future__ import annotations

import re
from typing import Any, Final

Field = dict[str, Any]
_NAMED: Final = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_JSON: Final[Field] = {"content": "json", "content_args": {"allow_non_json": True}, "repeats": True}
_WHOLE_CALL: Final[Field] = _JSON | {"transform": {"type": "function", "function": "{content}"}}
_ARGUMENTS: Final[Field] = _JSON | {"transform": _NAMED}
_NO_MARK: Final = "\x00"  # never occurs: the prompt is not parsed unless a template says where the answer begins


def _tags(pattern: str) -> Field:
    return {"content": "xml-inline", "content_args": {"tag_pattern": pattern}, "repeats": True, "transform": _NAMED}


_TOOL_CALLS: Final[tuple[tuple[str, Field], ...]] = (
    (
        "<minimax:tool_call>",
        _tags(r'<parameter name="(?P<key>[^"]+)">\s*(?P<value>.*?)\s*</parameter>')
        | {
            "open_pattern": r'\s*(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"]+)">',
            "close": "</invoke>",
        },
    ),
    (  # GLM 4.5 and later
        "<arg_key>",
        _tags(r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>")
        | {"open_pattern": r"\s*<tool_call>(?P<name>[^\n<]+)", "close": "</tool_call>"},
    ),
    (  # Qwen3-Coder, Qwen3.5
        "<function=",
        _tags(r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>")
        | {
            "open_pattern": r"\s*(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
            "close": "</function>",
        },
    ),
    (  # DeepSeek V3 and R1, with a fence around the arguments; V3.1 without
        "<\uff5ctool\u2581call\u2581begin\uff5c>",
        _ARGUMENTS
        | {
            "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
            r"(?!function<｜tool▁sep｜>)(?P<name>[^\n<]+)(?:<｜tool▁sep｜>|\n```json\n)",
            "close_pattern": r"(?:\n```)?\s*<｜tool▁call▁end｜>",
        },
    ),
    (  # Kimi K2, whose ids have a meaning: functions.NAME:NUMBER
        "<|tool_call_begin|>",
        _ARGUMENTS
        | {
            "transform": _NAMED | {"id": "{id}"},
            "open_pattern": r"\s*(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*"
            r"(?P<id>(?:functions\.)?(?P<name>[^:<\s]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
            "close": "<|tool_call_end|>",
        },
    ),
    (  # Mistral since 2025
        "[ARGS]",
        _ARGUMENTS
        | {"open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[{]+)\[ARGS\]", "close_pattern": r"(?=\[TOOL_CALLS\])"},
    ),
    ("[TOOL_CALLS]", _WHOLE_CALL | {"open": "[TOOL_CALLS]"}),  # Mixtral: a list of calls
    ("<|tool_call|>", _WHOLE_CALL | {"open": "<|tool_call|>"}),  # Granite: likewise
    ("<tool_call>", _WHOLE_CALL | {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>"}),  # Hermes, Qwen
)
_CONTENT: Final[Field] = {  # without the end marker of a list of calls
    "close_pattern": r"\s*(?:</minimax:tool_call>|</tool_call>|<｜tool▁calls▁end｜>|<\|tool_calls_section_end\|>)",
    "content": "text",
}
_THOUGHT: Final[Field] = {"open": "<think>", "close": "</think>", "content": "text"}
_HARMONY: Final[dict[str, Field]] = {  # gpt-oss
    "reasoning_content": {
        "open": "<|channel|>analysis<|message|>",
        "close_pattern": r"<\|end\|>(?:<\|start\|>assistant)?",
        "content": "text",
    },
    "tool_calls": _ARGUMENTS
    | {
        "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>[\w.-]+)\s*(?:<\|constrain\|>)?\w*"
        r"<\|message\|>"
        r"| to=functions\.(?P<name>[\w.-]+)<\|channel\|>commentary\s*(?:<\|constrain\|>)?\w*<\|message\|>",
        "close_pattern": r"<\|call\|>|<\|end\|>",
    },
    "content": {
        "open_pattern": r"<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w+)?<\|message\|>",
        "close_pattern": r"<\|return\|>|<\|end\|>(?:<\|start\|>assistant)?",
        "content": "text",
    },
}
_HARMONY_LARK: Final = r"""start: (<|channel|> "analysis" <|message|> text <|end|> <|start|> "assistant")? final @body
final: <|channel|> "final" <|message|>
text: /(.|\n)*/
"""


class AnswerFormat:
    """How a tokenizer's model writes reasoning and tool calls."""

    def __init__(self, tokenizer: Any) -> None:
        self._own: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
        self._thoughts_are_special = "<think>" in tokenizer.all_special_tokens
        self._fields: dict[str, Field] = {}  # of a response template
        templates = tokenizer.chat_template
        text = templates if isinstance(templates, str) else "".join((templates or {}).values())
        if "<|channel|>" in text:
            self._fields = _HARMONY
            return
        if "</think>" in text:
            self._fields["reasoning_content"] = _THOUGHT
        if calls := next((field for mark, field in _TOOL_CALLS if mark in text), None):
            self._fields["tool_calls"] = calls

    def template(self, prompt: str, with_tools: bool) -> tuple[dict[str, Any], str] | None:
        """The response template for the answer to a prompt, and the end of the prompt that the parser needs; None if
        the answer is plain text."""
        fields = (self._own or {}).get("fields", self._fields)
        used = {name: field for name, field in fields.items() if with_tools or name != "tool_calls"}
        if set(used) <= {"content"}:
            return None
        if self._own is not None:
            return self._own | {"fields": used}, prompt
        used.setdefault("content", _CONTENT if "tool_calls" in used else {"content": "text"})
        return {"start_anchor": _NO_MARK, "fields": used}, "<think>" if self._is_thinking(prompt) else ""

    def opening(self, prompt: str) -> str:
        """What may or must precede a constrained answer, as rules of a grammar; empty for nothing."""
        if self._fields is _HARMONY:
            return _HARMONY_LARK
        thinking = self._is_thinking(prompt)
        if self._fields.get("reasoning_content") is not _THOUGHT or re.search(r"</think>\s*$", prompt[-100:]):
            return ""
        if self._thoughts_are_special:
            begin, rules = "<think>", "thought: text </think>\ntext: /(.|\\n)*/\n"
        else:
            begin, rules = '"<think>"', "thought[lazy]: /(.|\\n)*<\\/think>/\n"
        start = "thought ws? @body" if thinking else f"({begin} thought ws?)? @body"
        return f"start: {start}\nws: /\\s+/\n{rules}"

    def _is_thinking(self, prompt: str) -> bool:
        return self._fields.get("reasoning_content") is _THOUGHT and bool(re.search(r"<think>\s*$", prompt[-100:]))
