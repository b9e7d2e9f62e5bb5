"""`moeoffload serve` as a user has it: a process with the demo checkpoint, and OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import tasks
from command_lines import Command, Commands, one_line_error, running_commands, wait_until
from conftest import DEMO
from prometheus_client.parser import text_string_to_metric_families

from many_requests.http_kit import Reply, ask

KEY = "0123456789abcdef0123"
RUNNING, WAITING = 32, 8
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}
ENDLESS: dict[str, Any] = {"model": "demo", "extra_body": {"ignore_eos": True}, "max_tokens": 4000}


@dataclass
class Server:
    """A running `moeoffload serve`."""

    command: Command
    port: int

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=KEY, max_retries=0, timeout=60)

    def ask(self, method: str, path: str, body: Any = None) -> Reply:
        return ask(self.port, method, path, body, Authorization=f"Bearer {KEY}")

    def counts(self) -> Any:
        return json.loads(self.ask("GET", "/stats").text)["requests"]


def start(commands: Commands, folder: Path, *options: str) -> Server:
    key_file = folder / "key"
    key_file.touch(0o600)
    key_file.write_text(KEY)
    words = ["--api-key-file", str(key_file), "--served-model-name", "demo", "--threads", "1", "--device", "cpu"]
    words += ["--server-memory-gib", "1", "--kv-gib", "0.02", "--port", "0", *options]
    command = commands.start("moeoffload", "serve", DEMO, *words)

    def said() -> bool:
        return command.ended or (command.out.exists() and command.out.read_text().endswith("\n"))

    wait_until(said, "the server", 120)
    line = re.fullmatch(r"serving demo at http://127\.0\.0\.1:([0-9]+)/v1\n", command.out.read_text())
    assert line is not None, command.err.read_text()
    return Server(command, int(line[1]))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    with running_commands(folder) as commands:
        yield start(commands, folder, "--max-running", str(RUNNING), "--max-waiting", str(WAITING))


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def chat_of(prompt: str) -> list[Any]:
    return [{"role": "user", "content": prompt}]


def test_chats_and_completions_streamed_or_not_give_the_same_answer(client: openai.OpenAI) -> None:
    prompt, answer = "reverse hello =", " olleh"
    chat = client.chat.completions.create(messages=chat_of(prompt), **GREEDY)
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (answer, "stop")
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens) == (15, 7, 22)
    completion = client.completions.create(prompt=prompt, **GREEDY)
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == (answer, "stop")
    usage: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(messages=chat_of(prompt), stream=True, stream_options=usage, **GREEDY))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == answer
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 22
    parts = list(client.completions.create(prompt=prompt, stream=True, **GREEDY))
    assert "".join(part.choices[0].text for part in parts) == answer
    assert parts[-1].choices[0].finish_reason == "stop"


def test_several_prompts_and_choices_are_told_apart(client: openai.OpenAI) -> None:
    prompts = ["reverse hello =", "sort hello ="]
    answer = client.completions.create(prompt=prompts, n=2, echo=True, **GREEDY)
    wanted = ["reverse hello = olleh"] * 2 + ["sort hello = ehllo"] * 2
    assert [choice.text for choice in answer.choices] == wanted
    tokens = client.completions.create(prompt=[list(prompt.encode()) for prompt in prompts], **GREEDY)
    assert [choice.text for choice in tokens.choices] == [" olleh", " ehllo"]
    cut = client.completions.create(prompt=prompts[0], stop=["lle", "zz"], **GREEDY)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (" o", "stop")


def test_a_seed_gives_the_same_text_again(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        wild: dict[str, Any] = {"temperature": 2, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
        answer = client.completions.create(model="demo", prompt="count a", n=2, seed=seed, **wild)
        return [choice.text for choice in answer.choices]

    first = texts(5)
    assert texts(5) == first
    assert first[0] != first[1]
    assert texts(77) != first


def test_log_probabilities_are_of_the_tokens_of_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=chat_of("sort hello ="), logprobs=True, top_logprobs=3, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == " ehllo"
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert 0 >= entry.logprob >= entry.top_logprobs[1].logprob >= entry.top_logprobs[2].logprob


def test_32_at_a_time_get_their_own_answers(server: Server, client: openai.OpenAI) -> None:
    prompts = tasks.prompts(32, seed=1)
    alone = [client.completions.create(prompt=prompt, **GREEDY).choices[0].text for prompt in prompts]

    async def together() -> list[str]:
        base_url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0, timeout=100) as many:
            answers = (many.completions.create(prompt=prompt, **GREEDY) for prompt in prompts)
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    assert asyncio.run(together()) == alone
    assert len(set(alone)) > 16


def test_a_second_turn_is_told_what_was_cached(client: openai.OpenAI) -> None:
    long = "add 12 30 = 42\n" * 20
    client.completions.create(prompt=long + "add 1 2 =", **GREEDY)
    usage = client.completions.create(prompt=long + "add 3 4 =", **GREEDY).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert usage.prompt_tokens_details.cached_tokens >= 0.8 * len(long)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_makes_room(server: Server, client: openai.OpenAI, stream: bool) -> None:
    before = server.counts()["cancelled"]
    if stream:
        with client.completions.create(prompt="x", stream=True, **ENDLESS) as chunks:
            assert [next(chunks).choices[0].finish_reason for _ in range(3)] == [None] * 3
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=1).completions.create(prompt="x", **ENDLESS)
    wait_until(lambda: server.counts()["cancelled"] == before + 1, "the cancel", 10)
    wait_until(lambda: server.counts()["running"] == 0, "the room", 10)


def test_a_full_server_says_when_to_come_again(server: Server, client: openai.OpenAI) -> None:
    before = server.counts()
    held = [client.completions.create(prompt="x", n=16, stream=True, **ENDLESS) for _ in range(2)]
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(prompt="x", n=16, **ENDLESS)
    assert int(caught.value.response.headers["Retry-After"]) >= 1
    for stream in held:
        stream.close()
    # Those of the third that had been taken are cancelled, too.
    wait_until(lambda: server.counts()["cancelled"] == before["cancelled"] + RUNNING + WAITING, "the cancels", 20)
    assert client.completions.create(prompt="reverse hello =", **GREEDY).choices[0].text == " olleh"


def test_errors_are_openai_s(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(prompt="x" * 9000, **GREEDY)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as no_model:
        client.completions.create(model="gpt", prompt="x")
    assert no_model.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as bad_key:
        client.with_options(api_key="sk-wrong").completions.create(prompt="x", **GREEDY)
    assert bad_key.value.code == "invalid_api_key"
    assert server.ask("POST", "/v1/completions", '{"model": ').error["code"] == "invalid_json"


def test_figures_are_for_who_runs_the_server(server: Server, client: openai.OpenAI) -> None:
    client.completions.create(prompt="sort hello =", **GREEDY)
    reply = server.ask("GET", "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    ended = {sample.labels["result"]: sample.value for sample in families["moeoffload_requests"].samples}
    assert ended["finished"] == server.counts()["finished"] > 0
    assert "<html" in server.ask("GET", "/dashboard").text.lower()
    assert (server.ask("GET", "/ready").status, server.ask("GET", "/health").status) == (200, 200)


def test_a_port_that_is_taken_is_one_clear_line(server: Server, tmp_path: Path) -> None:
    with running_commands(tmp_path) as commands:
        refused = commands.start("moeoffload", "serve", DEMO, "--port", str(server.port)).wait()
        assert f"port {server.port}" in one_line_error(refused, 2)
        refused = commands.start("moeoffload", "serve", DEMO, "--bind", "0.0.0.0").wait()
        assert "--api-key-file FILE" in one_line_error(refused, 2)


def test_a_stop_lets_requests_finish(commands: Commands, tmp_path: Path) -> None:
    server = start(commands, tmp_path, "--drain-seconds", "100")
    with server.client() as client:
        usage: Any = {"include_usage": True}
        stream = client.completions.create(
            prompt="x", max_tokens=800, stream=True, stream_options=usage, extra_body={"ignore_eos": True}, **GREEDY
        )
        next(stream)
        server.command.send(signal.SIGTERM)
        wait_until(lambda: server.ask("GET", "/ready").status == 503, "the stop")
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(prompt="x", **GREEDY)
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        rest = list(stream)
    assert rest[-2].choices[0].finish_reason == "length"
    assert rest[-1].usage is not None
    assert rest[-1].usage.completion_tokens == 800
    result = server.command.wait()
    assert result.code == 0, result.err
    commands.check_clean()


def test_a_second_signal_stops_at_once(commands: Commands, tmp_path: Path) -> None:
    server = start(commands, tmp_path, "--drain-seconds", "100")
    with server.client() as client:
        stream = client.completions.create(prompt="x", stream=True, **ENDLESS)
        next(stream)
        server.command.send(signal.SIGTERM)
        wait_until(lambda: server.ask("GET", "/ready").status == 503, "the stop")
        server.command.send(signal.SIGTERM)
        with pytest.raises(openai.APIError):
            list(stream)
    result = server.command.wait(20)
    assert result.code == 1
    assert "Traceback" not in result.err
    commands.check_clean()
