"""What OpenAI's client gets for what the engine says."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from command_lines import wait_until
from tokenizers import processors

from many_requests.http_kit import HI, FakeEngine, Running, serving, tokens_of
from moeoffload.errors import BusyError, ServerError
from moeoffload.serve import sse
from moeoffload.serve.request import FinishReason, Progress

TEXT = "h\u00e9llo \U0001f600 w\u20acrld"


@pytest.fixture(scope="module")
def server(tokenizer: Any) -> Iterator[Running]:
    with serving(FakeEngine(), tokenizer) as running:
        yield running


@pytest.fixture
def engine(server: Running) -> FakeEngine:
    """The server's engine as new."""
    server.engine.__init__(tokens_of(TEXT))  # type: ignore[misc]
    return server.engine


def test_a_stream_has_whole_characters_and_the_same_text(server: Running, engine: FakeEngine) -> None:
    got = server.chat(stream=True, stream_options={"include_usage": True})
    pieces = [choice.delta.content for chunk in got for choice in chunk.choices if choice.delta.content]
    assert "".join(pieces) == TEXT
    assert set(pieces) == set(TEXT)
    assert got[0].choices[0].delta.role == "assistant"
    assert got[-2].choices[0].finish_reason == "stop"
    assert got[-1].usage.completion_tokens == len(tokens_of(TEXT))
    assert {chunk.object for chunk in got} == {"chat.completion.chunk"}, "the last one, too"
    whole = server.chat().choices[0]
    assert (whole.message.content, whole.finish_reason) == (TEXT, "stop")


def test_a_stop_string_over_several_tokens_is_cut_and_never_told(server: Running, engine: FakeEngine) -> None:
    engine.held = True  # the answer goes on until it is cancelled
    engine.tokens = list(b"one two three END four")
    options: dict[str, Any] = {"stop": ["four", "END", "x", "y"], "logprobs": True}
    whole = server.chat(**options).choices[0]
    parts = [chunk.choices[0] for chunk in server.chat(stream=True, **options)]
    assert whole.message.content == "".join(part.delta.content or "" for part in parts) == "one two three "
    assert whole.finish_reason == parts[-1].finish_reason == "stop"
    for told in ([whole.logprobs], [part.logprobs for part in parts if part.logprobs]):
        assert "".join(entry.token for logprobs in told for entry in logprobs.content) == "one two three "
    wait_until(engine.all_cancelled, "the end of both requests")


def test_what_a_client_asks_for_reaches_the_engine(server: Running, engine: FakeEngine) -> None:
    answer = server.chat(
        [{"role": "developer", "content": "be"}, {"role": "user", "content": "hi"}],
        n=3, temperature=0.5, top_p=0.9, seed=7, max_completion_tokens=9, frequency_penalty=0.25, presence_penalty=-1,
        logit_bias={"65": 5}, logprobs=True, top_logprobs=2, user="u", metadata={"a": "b"}, store=False,
        extra_body={"top_k": 4, "ignore_eos": True, "min_p": 0},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert [ticket.options.seed for ticket in engine.tickets] == [7, 8, 9]
    options = engine.tickets[0].options
    assert (options.temperature, options.top_p, options.top_k, options.max_tokens) == (0.5, 0.9, 4, 9)
    assert (options.frequency_penalty, options.presence_penalty, options.bias) == (0.25, -1.0, {65: 5.0})
    assert (options.alternatives, options.ignore_eos) == (2, True)
    assert bytes(engine.tickets[0].prompt) == b"be\nhi"
    assert answer.usage.completion_tokens == 27
    told = answer.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in told] == [2] * 9
    assert bytes(part for entry in told for part in entry.bytes) == TEXT.encode()[:9]


def test_defaults_are_those_of_openai(server: Running, engine: FakeEngine) -> None:
    server.chat()
    answer = server.complete("abc", logprobs=2).choices[0]
    chat, completion = (ticket.options for ticket in engine.tickets)
    assert (chat.max_tokens, completion.max_tokens) == (engine.context_tokens - 2, 16)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.seed, chat.alternatives) == (1.0, 1.0, 0, None, None)
    assert answer.logprobs.text_offset == [at for at, letter in enumerate(TEXT) for _ in letter.encode()][:16]


def test_a_token_that_the_tokenizer_adds_takes_no_part_of_an_echo(tokenizer: Any) -> None:
    adding = copy.deepcopy(tokenizer)
    adding.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 257)]
    )
    text = "\u00e9<|endoftext|>b"
    with serving(FakeEngine(tokens_of("yes")), adding) as server:
        told = server.complete(text, logprobs=0, echo=True).choices[0]
    assert told.text == f"{text}yes"
    assert told.logprobs.tokens[0] == "<|pad|>"
    assert told.logprobs.text_offset == [0, 0, 0, 1, *range(len(text) - 1, len(text) + 4)]


@pytest.mark.parametrize("prompt", ["ab", ["ab", "ab"], [97, 98], [[97, 98], [97, 98]]])
def test_prompts_are_texts_or_tokens(server: Running, engine: FakeEngine, prompt: Any) -> None:
    engine.reused_tokens, engine.tokens = 1, tokens_of("cd")
    n_prompts = len(prompt) if isinstance(prompt[0], list) or prompt == ["ab", "ab"] else 1
    answer = server.complete(prompt, n=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["abcd"] * 2 * n_prompts
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2 * n_prompts, 6 * n_prompts)
    assert answer.usage.prompt_tokens_details.cached_tokens == n_prompts


def test_tools_go_to_a_template_that_takes_them(server: Running, engine: FakeEngine, tokenizer: Any) -> None:
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with (
        serving(FakeEngine(tokens_of("x")), tokenizer) as other,
        pytest.raises(openai.BadRequestError, match="takes no tools"),
    ):
        other.chat(tools=[tool])
    tokenizer.chat_template = (
        "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% if loud %}!{% endif %}"
        "{% for message in messages %}{% for call in message.tool_calls or [] %}({{ call.function.arguments.at }})"
        "{% endfor %}{{ message.content }}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "blue"},
    ]
    with serving(FakeEngine(tokens_of("<tool>")), tokenizer) as other:
        answer = other.chat(messages, tools=[tool], extra_body={"chat_template_kwargs": {"loud": True}})
        assert bytes(other.engine.tickets[0].prompt) == b"[look]!what?(sky)blue"
        assert answer.choices[0].message.content == "<tool>"
        with pytest.raises(openai.BadRequestError, match="not for clients to set"):
            other.chat(messages, extra_body={"chat_template_kwargs": {"chat_template": "x"}})


def test_a_full_queue_is_429_with_retry_after_and_leaves_nothing_behind(server: Running, engine: FakeEngine) -> None:
    engine.held, engine.room = True, 2
    with pytest.raises(openai.RateLimitError) as caught:
        server.chat(n=3)
    assert caught.value.response.headers["Retry-After"] == "4"
    assert caught.value.code == "rate_limit_exceeded"
    wait_until(engine.all_cancelled, "the cancels")
    assert len(engine.tickets) == 2


@pytest.mark.parametrize(
    ("error", "status"),
    [(ServerError("server b is lost"), 503), (BusyError("server b is full"), 503), (ValueError("a secret"), 500)],
)
def test_a_failed_answer_is_an_error_also_within_a_stream(
    server: Running, engine: FakeEngine, error: Exception, status: int
) -> None:
    engine.tokens, engine.error = list(b"abc"), error
    with pytest.raises(openai.InternalServerError) as caught:
        server.chat()
    got: list[Any] = []
    with server.client() as client, pytest.raises(openai.APIError) as within:
        got.extend(iter(client.chat.completions.create(model="demo", messages=HI, stream=True)))
    assert caught.value.status_code == status
    assert "".join(chunk.choices[0].delta.content or "" for chunk in got) == "abc"
    for told in (str(caught.value), str(within.value)):
        assert ("server b" in told) == (status == 503)
        assert "a secret" not in told
    raw = server.ask("POST", "/v1/completions", {"model": "demo", "prompt": "x", "stream": True}).text
    last = raw.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


def test_an_answer_that_the_engine_gives_up_is_503(server: Running, engine: FakeEngine) -> None:
    engine.tokens, engine.held = list(b"a"), True
    with server.client() as client:
        stream = client.chat.completions.create(model="demo", messages=HI, stream=True)
        next(stream)
        engine.tickets[0].tell(Progress(finish=FinishReason.CANCELLED))
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)


@pytest.mark.parametrize("n_tokens", [0, 5])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_requests(
    server: Running, engine: FakeEngine, stream: bool, n_tokens: int
) -> None:
    engine.held, engine.tokens = True, list(b"abcdefgh")[:n_tokens]
    body = {"model": "demo", "prompt": "x", "stream": stream, "n": 2}
    with server.leaving("/v1/completions", body):
        wait_until(lambda: len(engine.tickets) == 2, "the requests")
        assert not any(ticket.cancelled.is_set() for ticket in engine.tickets)
    wait_until(engine.all_cancelled, "the cancels", 5)


def test_a_client_that_reads_nothing_has_left(
    server: Running, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "SEND_TIMEOUT_S", 0.3)
    engine.held, engine.context_tokens, engine.tokens = True, 100_000, list(b"x" * 40_000)
    with server.leaving("/v1/completions", {"model": "demo", "prompt": "x", "stream": True, "max_tokens": 50_000}):
        wait_until(lambda: engine.tickets and engine.all_cancelled(), "the cancel")


def test_a_stream_with_nothing_to_say_is_kept_alive(
    server: Running, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.05)
    engine.held, engine.tokens = True, list(b"ab")
    with server.client() as client:
        response = client.completions.with_raw_response.create(model="demo", prompt="x", stream=True, max_tokens=3)
        lines = response.http_response.iter_lines()
        assert sum(line.startswith(": ping") for line in itertools.islice(lines, 12)) >= 2
        engine.held = False
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
