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

from many_requests.http_kit import FakeEngine, Running, serving, tokens_of
from moeoffload.errors import BusyError, ServerError
from moeoffload.serve import sse
from moeoffload.serve.request import FinishReason, Progress

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
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


def chunks(server: Running, **options: Any) -> list[Any]:
    with server.client() as client:
        return list(client.chat.completions.create(model="demo", messages=HELLO, stream=True, **options))


def test_a_stream_has_whole_characters_and_the_same_text(server: Running, engine: FakeEngine) -> None:
    got = chunks(server, stream_options={"include_usage": True})
    pieces = [choice.delta.content for chunk in got for choice in chunk.choices if choice.delta.content]
    assert "".join(pieces) == TEXT
    assert set(pieces) == set(TEXT)
    assert got[0].choices[0].delta.role == "assistant"
    assert got[-2].choices[0].finish_reason == "stop"
    assert got[-1].usage.completion_tokens == len(tokens_of(TEXT))
    assert {chunk.object for chunk in got} == {"chat.completion.chunk"}, "the last one, too"
    with server.client() as client:
        answer = client.chat.completions.create(model="demo", messages=HELLO)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"


def test_a_stop_string_over_several_tokens_is_cut_and_never_told(server: Running, engine: FakeEngine) -> None:
    engine.held = True  # the answer goes on until it is cancelled
    engine.tokens = list(b"one two three END four")
    for stream in (True, False):
        options: dict[str, Any] = {"stop": ["four", "END", "x", "y"], "logprobs": True}
        with server.client() as client:
            if stream:
                got = [chunk.choices[0] for chunk in chunks(server, **options)]
                text = "".join(choice.delta.content or "" for choice in got)
                tokens = [entry.token for choice in got if choice.logprobs for entry in choice.logprobs.content]
                reason = got[-1].finish_reason
            else:
                whole = client.chat.completions.create(model="demo", messages=HELLO, **options).choices[0]
                text, reason = whole.message.content or "", whole.finish_reason
                assert whole.logprobs is not None
                tokens = [entry.token for entry in whole.logprobs.content or ()]
        assert (text, reason) == ("one two three ", "stop")
        assert "".join(tokens) == text
        wait_until(lambda: all(ticket.cancelled.is_set() for ticket in engine.tickets), "the end of the request")


def test_what_a_client_asks_for_reaches_the_engine(server: Running, engine: FakeEngine) -> None:
    with server.client() as client:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": "hi"}],
            n=3,
            temperature=0.5,
            top_p=0.9,
            seed=7,
            max_completion_tokens=9,
            frequency_penalty=0.25,
            presence_penalty=-1,
            logit_bias={"65": 5},
            logprobs=True,
            top_logprobs=2,
            user="u",
            metadata={"a": "b"},
            store=False,
            extra_body={"top_k": 4, "ignore_eos": True, "min_p": 0},
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert [ticket.options.seed for ticket in engine.tickets] == [7, 8, 9]
    options = engine.tickets[0].options
    assert (options.temperature, options.top_p, options.top_k, options.max_tokens) == (0.5, 0.9, 4, 9)
    assert (options.frequency_penalty, options.presence_penalty, options.bias) == (0.25, -1.0, {65: 5.0})
    assert (options.alternatives, options.ignore_eos) == (2, True)
    assert bytes(engine.tickets[0].prompt) == b"be\nhi"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 27
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 9
    assert bytes(part for entry in logprobs.content for part in entry.bytes or ()) == TEXT.encode()[:9]


def test_defaults_are_those_of_openai(server: Running, engine: FakeEngine) -> None:
    with server.client() as client:
        client.chat.completions.create(model="demo", messages=HELLO)
        answer = client.completions.create(model="demo", prompt="abc", logprobs=2).choices[0]
    chat, completion = (ticket.options for ticket in engine.tickets)
    assert (chat.max_tokens, completion.max_tokens) == (engine.context_tokens - 2, 16)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.seed, chat.alternatives) == (1.0, 1.0, 0, None, None)
    assert answer.logprobs is not None
    assert answer.logprobs.text_offset == [at for at, letter in enumerate(TEXT) for _ in letter.encode()][:16]


def test_a_token_that_the_tokenizer_adds_takes_no_part_of_an_echo(tokenizer: Any) -> None:
    adding = copy.deepcopy(tokenizer)
    adding.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 257)]
    )
    text = "\u00e9<|endoftext|>b"
    with serving(FakeEngine(tokens_of("yes")), adding) as server, server.client() as client:
        told = client.completions.create(model="demo", prompt=text, logprobs=0, echo=True).choices[0]
    assert told.logprobs is not None
    assert told.text == f"{text}yes"
    assert (told.logprobs.tokens or [])[0] == "<|pad|>"
    assert told.logprobs.text_offset == [0, 0, 0, 1, *range(len(text) - 1, len(text) + 4)]


@pytest.mark.parametrize("prompt", ["ab", ["ab", "ab"], [97, 98], [[97, 98], [97, 98]]])
def test_prompts_are_texts_or_tokens(server: Running, engine: FakeEngine, prompt: Any) -> None:
    engine.reused_tokens = 1
    engine.tokens = tokens_of("cd")
    n_prompts = len(prompt) if isinstance(prompt[0], list) or prompt == ["ab", "ab"] else 1
    with server.client() as client:
        answer = client.completions.create(model="demo", prompt=prompt, n=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["abcd"] * 2 * n_prompts
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2 * n_prompts, 6 * n_prompts)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == n_prompts


def test_tools_go_to_a_template_that_takes_them(server: Running, engine: FakeEngine, tokenizer: Any) -> None:
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    with server.client() as client, pytest.raises(openai.BadRequestError, match="takes no tools"):
        client.chat.completions.create(model="demo", messages=HELLO, tools=[tool])
    plain = tokenizer.chat_template
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
    try:
        with serving(FakeEngine(tokens_of("<tool>")), tokenizer) as other, other.client() as client:
            extra: dict[str, Any] = {"chat_template_kwargs": {"loud": True}}
            answer = client.chat.completions.create(model="demo", messages=messages, tools=[tool], extra_body=extra)
            assert bytes(other.engine.tickets[0].prompt) == b"[look]!what?(sky)blue"
            assert answer.choices[0].message.content == "<tool>"
            extra = {"chat_template_kwargs": {"chat_template": "x"}}
            with pytest.raises(openai.BadRequestError, match="not for clients to set"):
                client.chat.completions.create(model="demo", messages=messages, extra_body=extra)
    finally:
        tokenizer.chat_template = plain


def test_a_full_queue_is_429_with_retry_after_and_leaves_nothing_behind(server: Running, engine: FakeEngine) -> None:
    engine.held, engine.room = True, 2
    with server.client() as client, pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="demo", messages=HELLO, n=3)
    assert caught.value.response.headers["Retry-After"] == "4"
    assert caught.value.code == "rate_limit_exceeded"
    wait_until(lambda: all(ticket.cancelled.is_set() for ticket in engine.tickets), "the cancels")
    assert len(engine.tickets) == 2


@pytest.mark.parametrize(
    ("error", "status"),
    [(ServerError("server b is lost"), 503), (BusyError("server b is full"), 503), (ValueError("a secret"), 500)],
)
def test_a_failed_answer_is_an_error_also_within_a_stream(
    server: Running, engine: FakeEngine, error: Exception, status: int
) -> None:
    engine.tokens, engine.error = list(b"abc"), error
    with server.client() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="demo", messages=HELLO)
        stream = client.chat.completions.create(model="demo", messages=HELLO, stream=True)
        got: list[Any] = []
        with pytest.raises(openai.APIError) as within:
            got.extend(iter(stream))
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
        stream = client.chat.completions.create(model="demo", messages=HELLO, stream=True)
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
    wait_until(lambda: all(ticket.cancelled.is_set() for ticket in engine.tickets), "the cancels", 5)


def test_a_client_that_reads_nothing_has_left(
    server: Running, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "SEND_TIMEOUT_S", 0.3)
    engine.held, engine.context_tokens, engine.tokens = True, 100_000, list(b"x" * 40_000)
    with server.leaving("/v1/completions", {"model": "demo", "prompt": "x", "stream": True, "max_tokens": 50_000}):
        wait_until(lambda: engine.tickets and engine.tickets[0].cancelled.is_set(), "the cancel")


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
