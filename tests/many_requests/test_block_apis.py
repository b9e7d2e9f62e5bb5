"""/v1/messages and /v1/responses, with Anthropic's and OpenAI's clients."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from models import secret_file
from openai.types.shared import Reasoning

from many_requests.http_kit import HI, KEY, FakeEngine, Process, Running, serving, tokens_of
from moeoffload.errors import ServerError

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"]}
CLOSED: dict[str, Any] = SCHEMA | {"additionalProperties": False}
ANTHROPIC_TOOLS: list[Any] = [{"name": "add", "description": "adds", "input_schema": CLOSED}]
TOOLS: list[Any] = [{"type": "function", "name": "add", "parameters": CLOSED, "strict": True}]
UNUSED: dict[str, Any] = {"tool_choice": "none"}  # their text does not go to the model, but back to the client
SHOWING = """{# <think></think> <tool_call> #}{% for m in messages %}[{{ m['role'] }}|{{ m['content'] }}|\
{{ m['reasoning_content'] }}|{% for c in m['tool_calls'] or [] %}{{ c.function.name }}{{ c.function.arguments.a }}\
{% endfor %}]{% endfor %}{{ tools | length }}"""


@pytest.fixture(scope="module")
def server(tokenizer: Any) -> Iterator[Running]:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = SHOWING
    engine = FakeEngine(tokens_of(f"<think>hm</think>\n\nyes\n{CALL}"))
    engine.context_tokens = 2000
    with serving(engine, tokenizer) as running:
        yield running


def prompt_of(server: Running) -> str:
    return bytes(server.engine.tickets[-1].prompt).decode()


def test_messages_whole_and_streamed(server: Running) -> None:
    answered = [
        {"type": "thinking", "thinking": "so", "signature": ""},
        {"type": "text", "text": "ok"},
        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 3}},
    ]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "4"}
    messages = [*HI, {"role": "assistant", "content": answered}, {"role": "user", "content": [result]}]
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 500, "messages": messages, "tools": ANTHROPIC_TOOLS}
    asked["system"] = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]
    asked["extra_body"] = {"top_k": 5}
    with server.anthropic() as client:
        whole = client.messages.create(**asked, stop_sequences=["%%"])
        assert prompt_of(server) == "[system|be||][user|hi||][assistant|ok|so|add3][tool|4||]1"
        assert server.engine.tickets[-1].options.top_k == 5
        with client.messages.stream(**asked) as stream:
            texts = list(stream.text_stream)
            final = stream.get_final_message()
        cut = client.messages.create(**asked | {"max_tokens": 9})
        n_tickets = len(server.engine.tickets)
        del asked["max_tokens"]
        count = client.messages.count_tokens(**asked)
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.count_tokens(**asked | {"extra_body": {"container": "x"}})
    assert (count.input_tokens, len(server.engine.tickets)) == (whole.usage.input_tokens, n_tickets)
    assert (refused.value.body["type"], refused.value.body["error"]["param"]) == ("error", "container")
    for told in (whole, final):
        kinds = told.content
        assert [block.type for block in kinds] == ["thinking", "text", "tool_use"]
        assert (kinds[0].thinking, kinds[1].text, kinds[2].name, kinds[2].input) == ("hm", "yes", "add", {"a": 1})
        assert (told.stop_reason, told.usage.output_tokens) == ("tool_use", len(server.engine.tokens))
        assert told.usage.input_tokens == len(server.engine.tickets[-1].prompt)
    assert "".join(texts) == "yes"
    assert (cut.stop_reason, cut.content[0].type) == ("max_tokens", "thinking")


def test_what_the_assistant_has_begun_to_say_is_continued(tokenizer: Any) -> None:
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 9, "stop_sequences": ["s", "%"]}
    with serving(FakeEngine(tokens_of("yes")), tokenizer) as server, server.anthropic() as client:
        told = client.messages.create(**asked, messages=[*HI, {"role": "assistant", "content": "{"}])
        assert prompt_of(server).endswith("{")
        assert (told.content[0].text, told.stop_reason, told.stop_sequence) == ("ye", "stop_sequence", "s")
        with client.messages.stream(**asked, messages=HI) as stream:
            final = stream.get_final_message()
        assert not prompt_of(server).endswith("{")
        assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "s")


def test_responses_whole_and_streamed(server: Running) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 3}'},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ]
    asked: dict[str, Any] = {"model": "demo", "input": items, "instructions": "be", "tools": TOOLS, "store": False}
    asked["reasoning"] = {"effort": "low", "summary": "detailed"}
    with server.client() as client:
        whole = client.responses.create(**asked)
        assert prompt_of(server) == "[system|be||][user|hi||][assistant|||add3][tool|4||]1"
        with client.responses.stream(**asked) as stream:
            events = [event.type for event in stream]
            final = stream.get_final_response()
        cut = client.responses.create(**asked, max_output_tokens=9)
        client.responses.create(**asked | {"input": [*items, *(item.model_dump() for item in whole.output)]})
        assert prompt_of(server).endswith("[tool|4||][assistant|yes|hm|add1]1")
    for told in (whole, final):
        kinds = told.output
        assert [item.type for item in kinds] == ["reasoning", "message", "function_call"]
        assert (kinds[0].content[0].text, told.output_text) == ("hm", "yes")
        assert (kinds[0].summary, told.reasoning) == ([], Reasoning(effort="low", summary=None)), "none is written"
        assert (kinds[2].name, json.loads(kinds[2].arguments)) == ("add", {"a": 1})
        assert told.status == "completed"
        assert told.usage.output_tokens == len(server.engine.tokens)
    assert events[:2] == ["response.created", "response.in_progress"]
    assert events[-1] == "response.completed"
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_messages_errors_are_those_of_anthropic(tokenizer: Any, tmp_path: Path) -> None:
    engine, file = FakeEngine(tokens_of("yes")), secret_file(tmp_path / "key", KEY)

    def refused(kind: type[anthropic.APIStatusError], key: str = KEY, **change: Any) -> str:
        asked = {"model": "demo", "messages": HI, "max_tokens": 9} | change
        with running.anthropic(key) as client, pytest.raises(kind) as caught:
            list(client.messages.create(**asked))
        body: Any = caught.value.body
        assert body["type"] == "error"
        return str(body["error"]["type"])

    with serving(engine, tokenizer, KEY, api_key_file=file) as running:
        assert refused(anthropic.NotFoundError, model="other") == "not_found_error"
        assert refused(anthropic.BadRequestError, max_tokens=0) == "invalid_request_error"
        assert refused(anthropic.AuthenticationError, "none") == "authentication_error"
        large = [{"role": "user", "content": "x" * (9 << 20)}]
        assert refused(anthropic.ContentTooLargeError, messages=large) == "request_too_large"
        engine.room = 0
        assert refused(anthropic.RateLimitError) == "rate_limit_error"
        engine.room, engine.error, engine.tokens = 9, RuntimeError("secret"), []
        assert refused(anthropic.InternalServerError) == "api_error"
        engine.error = ServerError("server b is lost")
        assert refused(anthropic.InternalServerError) == "overloaded_error"
        assert refused(anthropic.APIStatusError, stream=True) == "overloaded_error"
    with serving(engine, tokenizer) as running:
        reply = running.ask("POST", "/v1/messages", {}, Origin="https://attacker.example")
        assert (reply.status, reply.error["type"]) == (403, "permission_error")


def test_an_error_within_a_stream_reaches_the_client(tokenizer: Any) -> None:
    engine = FakeEngine(b"ab")
    engine.error = RuntimeError("secret")
    with serving(engine, tokenizer) as server, server.anthropic() as client, server.client() as other:
        with (
            pytest.raises(anthropic.APIStatusError, match="had an error"),
            client.messages.stream(model="demo", messages=HI, max_tokens=9) as stream,
        ):
            stream.get_final_message()
        with pytest.raises(openai.APIError, match="had an error"):
            list(other.responses.create(model="demo", input="x", stream=True))


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("messages", {"max_tokens": None}, "max_tokens"),
        ("messages", {"container": "x"}, "container"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ("messages", {"tool_choice": {"type": "odd"}}, "tool_choice"),
        ("messages", {"temperature": 3}, "temperature"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]}, "messages"),
        ("responses", {"previous_response_id": "x"}, "previous_response_id"),
        ("responses", {"input": [{"type": "item_reference"}]}, "input"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ("responses", {"background": True}, "background"),
        ("responses", {"input": [{"role": "user", "content": 5}]}, "input"),
        ("responses", {"input": [{"type": "function_call_output", "output": 5}]}, "input"),
        ("responses", {"input": [{"type": "reasoning", "content": "so"}]}, "input"),
        ("responses", {"input": [{"type": "reasoning", "content": 5}]}, "input"),
        ("responses", {"input": [{"type": "reasoning", "content": [5]}]}, "input"),
        ("responses", {"text": {"format": "json"}}, "text.format"),
        ("responses", {"text": {"verbosity": "low"}}, "verbosity"),
        ("responses", {"text": {"style": "low"}}, "text.style"),
        ("responses", {"reasoning": {"budget": 5}}, "reasoning.budget"),
        ("responses", UNUSED | {"tools": [TOOLS[0] | {"description": "\ud800"}]}, "tools"),
        ("responses", UNUSED | {"tools": [TOOLS[0] | {"parameters": {"default": float("nan")}}]}, "tools"),
    ],
)
def test_what_they_cannot_do_is_refused_by_name(server: Running, path: str, change: dict[str, Any], param: str) -> None:
    base: Any = {"max_tokens": 9, "messages": HI} if path == "messages" else {"input": "x"}
    reply = server.ask("POST", f"/v1/{path}", {"model": "demo"} | base | change)
    assert (reply.status, reply.error["param"]) == (400, param), reply.text
    assert json.loads(reply.text).get("type") == ("error" if path == "messages" else None)


def test_forced_calls_and_schemas_in_the_real_process(serve_process: Process) -> None:
    forced = {"type": "tool", "name": "add"}
    with serve_process.anthropic() as client:
        told = client.messages.create(
            model="demo", max_tokens=500, messages=HI, tools=ANTHROPIC_TOOLS, tool_choice=forced
        )
    block = told.content[0]
    assert (block.type, block.name, told.stop_reason) == ("tool_use", "add", "tool_use")
    assert 0 <= block.input["a"] <= 9
    with serve_process.client() as other:
        form = {"format": {"type": "json_schema", "name": "it", "schema": CLOSED, "strict": True}}
        answer = other.responses.create(model="demo", input="go", text=form, max_output_tokens=500)
    assert 0 <= json.loads(answer.output_text)["a"] <= 9


def test_anthropic_s_header_is_a_key_too(tokenizer: Any, tmp_path: Path) -> None:
    file = secret_file(tmp_path / "key", KEY)
    ask_for: Any = {"model": "demo", "messages": HI, "max_tokens": 9}
    with serving(FakeEngine(tokens_of("yes")), tokenizer, KEY, api_key_file=file) as server:
        with server.anthropic("none") as client, pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(**ask_for)
        assert caught.value.body["type"] == "error"  # type: ignore[index, call-overload]
        with server.anthropic() as client:
            assert client.messages.create(**ask_for).content[0].text == "yes"
