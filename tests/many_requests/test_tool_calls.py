"""Tool calls and reasoning: how families write them, and what OpenAI's client gets."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import tasks

from many_requests.http_kit import HI, FakeEngine, Process, serving, tokens_of

CLOSED: dict[str, Any] = {"additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": properties, **CLOSED}}}
    for name, properties in (
        ("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}),
        ("add", {"a": {"type": "integer"}, "b": {"type": "integer"}}),
    )
]
PARIS, SUM = {"city": "Paris <3", "days": 2}, {"a": 1, "b": 2}
SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def call(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


def both(form: Any) -> str:
    return str(form("get_weather", PARIS) + form("add", SUM))


FAMILIES = {
    "hermes": ("<tool_call>", both(lambda name, given: f"\n<tool_call>\n{call(name, given)}\n</tool_call>")),
    "qwen-xml": (
        "<tool_call> <function=",
        both(
            lambda name, given: (
                f"\n<tool_call>\n<function={name}>\n"
                + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
                + "</function>\n</tool_call>"
            )
        ),
    ),
    "glm": (
        "<tool_call> <arg_key>",
        both(
            lambda name, given: (
                f"\n<tool_call>{name}\n"
                + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in given.items())
                + "</tool_call>"
            )
        ),
    ),
    "minimax": (
        "<minimax:tool_call>",
        "\n<minimax:tool_call>"
        + both(
            lambda name, given: (
                f'\n<invoke name="{name}">\n'
                + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in given.items())
                + "</invoke>"
            )
        )
        + "\n</minimax:tool_call>",
    ),
    "deepseek-v3": (
        BEGIN,
        "<｜tool▁calls▁begin｜>"
        + both(lambda name, given: f"{BEGIN}function{SEP}{name}\n```json\n{json.dumps(given)}\n```{END}\n")
        + "<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": (BEGIN, both(lambda name, given: f"{BEGIN}{name}{SEP}{json.dumps(given)}{END}")),
    "kimi": (
        "<|tool_call_begin|>",
        "<|tool_calls_section_begin|>"
        + both(
            lambda name, given: (
                f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{json.dumps(given)}<|tool_call_end|>"
            )
        )
        + "<|tool_calls_section_end|>",
    ),
    "mistral": (
        "[TOOL_CALLS] [ARGS]",
        both(lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}"),
    ),
    "mixtral": ("[TOOL_CALLS]", f"[TOOL_CALLS] [{call('get_weather', PARIS)}, {call('add', SUM)}]"),
    "granite": ("<|tool_call|>", f"<|tool_call|>[{call('get_weather', PARIS)}, {call('add', SUM, 'parameters')}]"),
    "gpt-oss": (
        "<|channel|>",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + json.dumps(PARIS) + "<|call|>"
        "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>" + json.dumps(SUM),
    ),
}


def ask(tokenizer: Any, marks: str, text: str, ending: str = "", **options: Any) -> tuple[Any, list[Any]]:
    """The message, whole, and the chunks of a stream."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = f"{{# tools {marks} #}}{{{{ messages[-1]['content'] }}}}{ending}"
    engine = FakeEngine(tokens_of(text))
    engine.context_tokens = 4000
    with serving(engine, tokenizer) as server:
        return server.chat(**options).choices[0], [chunk.choices[0] for chunk in server.chat(stream=True, **options)]


def told(chunks: list[Any], kind: str) -> str:
    return "".join(getattr(chunk.delta, kind, None) or "" for chunk in chunks)


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_a_family_are_parsed_streamed_or_not(tokenizer: Any, family: str) -> None:
    marks, text = FAMILIES[family]
    words = "" if family == "gpt-oss" else "Let me see."
    whole, chunks = ask(tokenizer, marks, words + text, tools=TOOLS)
    expected = [("get_weather", PARIS), ("add", SUM)]
    assert [(each.function.name, json.loads(each.function.arguments)) for each in whole.message.tool_calls] == expected
    assert (whole.message.content or "", whole.finish_reason) == (words, "tool_calls")
    calls = [each for chunk in chunks for each in chunk.delta.tool_calls or ()]
    assert [(each.function.name, json.loads(each.function.arguments)) for each in calls] == expected
    assert [each.index for each in calls] == [0, 1]
    assert len({each.id for each in calls}) == 2
    # Kimi's template writes ids as the model does; Mistral's take no others than these.
    assert all(re.fullmatch("[a-z0-9]{9}" if family != "kimi" else r"functions\.\w+:0", each.id) for each in calls)
    assert (told(chunks, "content"), chunks[-1].finish_reason) == (words, "tool_calls")
    without, _ = ask(tokenizer, marks, words + text)
    assert without.message.tool_calls is None
    assert without.finish_reason == "stop"


def test_a_template_that_takes_arguments_as_text_only_gets_them(tokenizer: Any) -> None:
    """As DeepSeek's, which joins them to more text."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for message in messages %}{% for call in message['tool_calls'] or [] %}"
        "{{ call['function']['arguments'] + '!' }}{% endfor %}{% endfor %}"
    )
    told = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": json.dumps(SUM)}}]
    with serving(FakeEngine(tokens_of("yes")), tokenizer) as server:
        server.chat(messages=[*HI, {"role": "assistant", "tool_calls": told}])
        assert bytes(server.engine.tickets[-1].prompt).decode() == json.dumps(SUM) + "!"


def test_one_call_is_the_end_where_no_more_are_wanted(tokenizer: Any) -> None:
    whole, chunks = ask(tokenizer, *FAMILIES["hermes"], tools=TOOLS, parallel_tool_calls=False)
    assert [each.function.name for each in whole.message.tool_calls] == ["get_weather"]
    assert len([each for chunk in chunks for each in chunk.delta.tool_calls or ()]) == 1
    assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls"


NO_JSON = '{"name": "add", "arguments": {"a": 1e999}}'  # Python would write it as Infinity
HALF = r'{"name": "add", "arguments": {"a": "\ud800"}}'  # of a surrogate pair: no Unicode, so that it cannot be sent
TOO_DEEP = '{"name": "add", "arguments": "' + "[" * 3000 + '"}'


def test_what_is_no_call_stays_in_the_text(tokenizer: Any) -> None:
    for body in ("{broken", '{"no": "name"}', "[1]", NO_JSON, HALF, TOO_DEEP):
        whole, chunks = ask(tokenizer, "<tool_call>", f"a<tool_call>{body}</tool_call>b", tools=TOOLS)
        assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == (f"a{body}b", None, "stop")
        assert told(chunks, "content") == f"a{body}b"


@pytest.mark.parametrize("text", [NO_JSON, HALF])
def test_a_forced_call_that_is_no_json_is_told_as_text(tokenizer: Any, text: str) -> None:
    whole, chunks = ask(tokenizer, "<tool_call>", f"[{text}]", tools=TOOLS, tool_choice="required")
    assert (whole.message.content, whole.message.tool_calls) == (text, None)
    assert told(chunks, "content") == text


@pytest.mark.parametrize(("ending", "begin"), [("", "<think>\n"), ("<think>\n", ""), ("<think>", "\n")])
def test_reasoning_is_split_off(tokenizer: Any, ending: str, begin: str) -> None:
    text = (
        f"{begin}two lines\nof thought \n</think>\n\n answer </think> \n<tool_call>\n{call('add', SUM)}\n</tool_call>"
    )
    whole, chunks = ask(tokenizer, "<think></think><tool_call>", text, ending, tools=TOOLS)
    assert whole.message.reasoning_content == told(chunks, "reasoning_content") == "two lines\nof thought"
    assert whole.message.content == told(chunks, "content") == "answer </think>"
    assert [each.function.name for each in whole.message.tool_calls] == ["add"]
    cut, _ = ask(tokenizer, "<think></think>", "<think>unfinished", max_tokens=9)
    assert (cut.message.reasoning_content, cut.message.content, cut.finish_reason) == ("un", "", "length")


def test_the_template_of_a_tokenizer_comes_first(tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.response_template = {
        "start_anchor": "hi",
        "fields": {"thinking": {"open": "((", "close": "))", "content": "text"}, "content": {"content": "text"}},
    }
    whole, _ = ask(tokenizer, "<think></think>", "((why))<think>x")
    assert (whole.message.reasoning_content, whole.message.content) == ("why", "<think>x")


def test_gpt_oss_s_channels(tokenizer: Any) -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes"
    whole, chunks = ask(tokenizer, "<|channel|>", text)
    assert (whole.message.reasoning_content, whole.message.content) == ("hm", "yes")
    assert (told(chunks, "reasoning_content"), told(chunks, "content")) == ("hm", "yes")


def test_the_demo_s_template_writes_chats_as_the_model_was_trained_on_them(tokenizer: Any) -> None:
    rng = random.Random(0)
    for _ in range(50):
        tools, turns = tasks.conversation("held-out", rng)
        text = tasks.tools_text(tools)
        messages: list[dict[str, Any]] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn.prompt})
            if turn.tool is not None:
                call = {"name": turn.tool.name, "arguments": turn.tool.arguments(turn.prompt)}
                messages.append({"role": "assistant", "tool_calls": [{"type": "function", "function": call}]})
                messages.append({"role": "tool", "content": turn.result})
            messages.append({"role": "assistant", "content": turn.answer})
            text += "".join(f"{given}{answer}{tokenizer.eos_token}\n" for given, answer in tasks.chat_steps(turn))
        shown = [tool.schema() for tool in tools]
        assert tokenizer.apply_chat_template(messages, tools=shown, tokenize=False) == text


PRICES = {"pear": 17, "lamp": 230, "sofa": 899}
OWN_TOOLS: dict[str, tuple[tuple[str, ...], Callable[..., object]]] = {
    "price": (("item",), lambda item: PRICES[item]),
    "sum": (("a", "b"), lambda a, b: a + b),
    "weather": (("city", "date"), lambda city, date: len(city) + date),
}
ASKED = (
    ("price pear =", "17"), ("sum 250 17 =", "267"), ("sort hello =", "ehllo"), ("weather oslo 3 =", "7"),
    ("add 12 30 =", "42"), ("price sofa =", "899"), ("reverse lamp =", "pmal"), ("weather rome 12 =", "16"),
    ("price lamp =", "230"), ("sum 899 230 =", "1129"),
)  # fmt: skip
"""What is asked turn by turn, and the answer; what is no tool's name is a task that the model does by itself."""


def parameters_of(name: str) -> dict[str, Any]:
    names = OWN_TOOLS[name][0]
    return {"type": "object", "properties": {each: {} for each in names}, "required": list(names)}


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_whose_model_decides_when_to_call_one_of_three_tools(serve_process: Process, streamed: bool) -> None:
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": parameters_of(name)}} for name in OWN_TOOLS
    ]
    messages: list[Any] = []
    with serve_process.client() as client:

        def answer() -> Any:
            asked: dict[str, Any] = {"model": "demo", "messages": messages, "tools": tools}
            if not streamed:
                return client.chat.completions.create(**asked).choices[0].message
            with client.chat.completions.stream(**asked) as stream:
                return stream.get_final_completion().choices[0].message

        for prompt, expected in ASKED:
            messages.append({"role": "user", "content": prompt})
            said = answer()
            assert bool(said.tool_calls) == (prompt.split()[0] in OWN_TOOLS), prompt
            if said.tool_calls:
                (call,) = said.tool_calls
                result = OWN_TOOLS[call.function.name][1](**json.loads(call.function.arguments))
                messages.append(said.model_dump(exclude_none=True, exclude={"parsed"}))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
                said = answer()
            assert said.content.strip() == expected
            messages.append({"role": "assistant", "content": said.content})


def test_an_agent_by_the_messages_api(serve_process: Process) -> None:
    tools: list[Any] = [{"name": name, "input_schema": parameters_of(name)} for name in OWN_TOOLS]
    messages: list[Any] = []
    with serve_process.anthropic() as client:

        def answer() -> Any:
            asked: dict[str, Any] = {"model": "demo", "messages": messages, "tools": tools}
            with client.messages.stream(max_tokens=200, **asked) as stream:
                said = stream.get_final_message()
            messages.append(
                {"role": "assistant", "content": [each.model_dump(exclude_none=True) for each in said.content]}
            )
            return said

        for prompt, expected in ASKED:
            messages.append({"role": "user", "content": prompt})
            said = answer()
            assert (said.stop_reason == "tool_use") == (prompt.split()[0] in OWN_TOOLS), prompt
            if said.stop_reason == "tool_use":
                (call,) = (each for each in said.content if each.type == "tool_use")
                result = str(OWN_TOOLS[call.name][1](**call.input))
                messages.append(
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}]}
                )
                said = answer()
            assert said.content[0].text.strip() == expected


def test_an_agent_with_three_tools_over_ten_turns(serve_process: Process) -> None:
    """Calls that are forced: the grammar decides what they may say."""
    point = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["x"]}
    functions: dict[str, Any] = {
        "add": {"properties": {key: {"enum": [1, 2, 3]} for key in "ab"}, "required": ["a", "b"], **CLOSED},
        "look": {"$defs": {"p": point | CLOSED}, "properties": {"at": {"$ref": "#/$defs/p"}}, "required": ["at"]}
        | CLOSED,
        "stop": None,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": functions[name]}} for name in functions]
    results: dict[str, Any] = {"add": lambda a, b: a + b, "look": lambda at: at["x"], "stop": lambda: "no"}
    messages: list[Any] = [{"role": "user", "content": "go"}]
    used: set[str] = set()
    with serve_process.client() as client:
        for turn in range(10):
            named = {"type": "function", "function": {"name": list(functions)[turn // 2 % 3]}}
            choice = "required" if turn % 2 else named
            options = {"tools": tools, "tool_choice": choice, "seed": turn, "parallel_tool_calls": False}
            with client.chat.completions.stream(model="demo", messages=messages, temperature=1, **options) as stream:
                answer = stream.get_final_completion().choices[0]
            assert answer.finish_reason == "tool_calls"
            (asked,) = answer.message.tool_calls
            if choice is named:
                assert asked.function.name == list(functions)[turn // 2 % 3]
            result = results[asked.function.name](**json.loads(asked.function.arguments))
            used.add(asked.function.name)
            messages.append(answer.message.model_dump(exclude_none=True, exclude={"parsed"}))
            messages.append({"role": "tool", "tool_call_id": asked.id, "content": str(result)})
    final = serve_process.chat(messages, tools=tools, tool_choice="none", n=1)
    assert used == set(functions)
    assert final.choices[0].finish_reason in ("stop", "length")


def test_several_calls_at_once_if_they_may_be(serve_process: Process) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    body = {"model": "demo", "messages": HI, "tools": tools, "tool_choice": "required", "seed": 1}
    reply = serve_process.ask("POST", "/v1/chat/completions", body | {"logit_bias": {str(ord("]")): -100}})
    choice = json.loads(reply.text)["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert [each["function"]["arguments"] for each in calls] == ["{}"] * 16
    assert {each["function"]["name"] for each in calls} <= {"a", "b"}


def test_a_forced_call_that_is_cut_is_told_as_far_as_it_was_written(serve_process: Process) -> None:
    body = {"model": "demo", "messages": HI, "tools": TOOLS, "tool_choice": "required", "max_tokens": 20}
    reply = serve_process.ask("POST", "/v1/chat/completions", body)
    choice = json.loads(reply.text)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith('{"name": "')
    assert not choice["message"].get("tool_calls")
