"""`moeoffload serve` as a user has it: a process with the demo checkpoint, and OpenAI's client."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import tasks
from command_lines import Commands, one_line_error, wait_until
from conftest import DEMO, RunningServer, StartServer
from terminals import CTRL_C, Terminal

from many_requests.http_kit import RUNNING, WAITING, Http, Process, start_serve

N_OFFERED = 128
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}
ENDLESS: dict[str, Any] = {"model": "demo", "extra_body": {"ignore_eos": True}, "max_tokens": 4000}


def chat_of(prompt: str) -> list[Any]:
    return [{"role": "user", "content": prompt}]


def test_chats_and_completions_streamed_or_not_give_the_same_answer(serve_process: Process) -> None:
    prompt, answer = "reverse hello =", " olleh"
    chat = serve_process.chat(chat_of(prompt), temperature=0)
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (answer, "stop")
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens) == (15, 7, 22)
    completion = serve_process.complete(prompt, temperature=0).choices[0]
    assert (completion.text, completion.finish_reason) == (answer, "stop")
    chunks = serve_process.chat(chat_of(prompt), stream=True, stream_options={"include_usage": True}, temperature=0)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == answer
    assert chunks[-1].usage.total_tokens == 22
    parts = serve_process.complete(prompt, stream=True, temperature=0)
    assert "".join(part.choices[0].text for part in parts) == answer
    assert parts[-1].choices[0].finish_reason == "stop"


def test_an_answer_that_ends_at_a_stop_string_is_finished_and_not_cancelled(serve_process: Process) -> None:
    before = serve_process.counts()
    chat = serve_process.chat(chat_of("reverse hello ="), stop=["le"], temperature=0).choices[0]
    assert (chat.message.content, chat.finish_reason) == (" ol", "stop")
    wait_until(lambda: serve_process.counts()["running"] == 0, "the end of the request")
    after = serve_process.counts()
    assert [after[each] - before[each] for each in ("finished", "cancelled")] == [1, 0]


def test_the_address_alone_leads_to_the_dashboard(serve_process: Process) -> None:
    reply = serve_process.ask("GET", "/")
    assert (reply.status, reply.headers["location"]) == (307, "/dashboard")


def test_more_than_it_takes_are_answered_or_told_to_come_again(serve_process: Process) -> None:
    server = serve_process
    process = psutil.Process(server.command.process.pid)
    options: dict[str, Any] = {"prompt": "x", "max_tokens": 60, "extra_body": {"ignore_eos": True}, **GREEDY}

    async def offer() -> list[Any]:
        async with server.clients() as many:
            asked = (many.completions.create(**options) for _ in range(N_OFFERED))
            return await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(offer())  # connections and buffers are made once
    before, rejected = process.memory_info().rss, server.counts()["rejected"]
    told = asyncio.run(offer())
    refused = [each for each in told if isinstance(each, openai.RateLimitError)]
    answered = [each for each in told if not isinstance(each, BaseException)]
    assert len(refused) + len(answered) == N_OFFERED
    assert server.counts()["rejected"] - rejected == len(refused)
    assert len(answered) >= RUNNING + WAITING
    assert refused
    assert all(int(each.response.headers["Retry-After"]) >= 1 for each in refused)
    assert {each.usage.completion_tokens for each in answered} == {60}
    assert process.memory_info().rss - before < 64 << 20
    wait_until(lambda: server.counts()["running"] == server.counts()["waiting"] == 0, "the end of all", 10)


def test_a_port_that_is_taken_and_an_open_one_are_one_clear_line(commands: Commands, serve_process: Process) -> None:
    refused = commands.run("moeoffload", "serve", DEMO, "--port", str(serve_process.port))
    assert f"port {serve_process.port}" in one_line_error(refused, 2)
    refused = commands.run("moeoffload", "serve", DEMO, "--bind", "0.0.0.0")
    assert "--api-key-file FILE" in one_line_error(refused, 2)


def test_a_stop_lets_requests_finish(commands: Commands, tmp_path: Path) -> None:
    server = start_serve(commands, tmp_path, "--drain-seconds", "100")
    with server.client() as client:
        options = ENDLESS | {"max_tokens": 300, "stream_options": {"include_usage": True}}
        stream = client.completions.create(prompt="x", stream=True, **options)
        next(stream)
        server.command.send(signal.SIGTERM)
        wait_until(lambda: server.ask("GET", "/ready").status == 503, "the stop")
        with pytest.raises(openai.InternalServerError) as refused:
            server.complete()
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        rest = list(stream)
    assert rest[-2].choices[0].finish_reason == "length"
    assert rest[-1].usage.completion_tokens == 300
    result = server.command.wait()
    assert result.code == 0, result.err
    commands.check_clean()


def test_a_second_signal_stops_at_once(commands: Commands, tmp_path: Path) -> None:
    server = start_serve(commands, tmp_path, "--drain-seconds", "100")
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
    assert len(result.err.splitlines()) == 2, "what it waits for, and that it gives up"
    commands.check_clean()


def test_a_second_ctrl_c_ends_at_once_what_the_first_one_waits_for(server: RunningServer) -> None:
    words = ("--experts", server.address, "--threads", "1", "--device", "cpu", "--kv-gib", "0.02", "--port", "0")
    with Terminal("moeoffload", "serve", DEMO, *words, "--drain-seconds", "100", columns=80) as terminal:
        terminal.until("/v1\r\n")
        port = re.findall(r"http://127\.0\.0\.1:([0-9]+)/v1", terminal.shown)[-1]
        with Http(int(port), "none").client() as client:
            stream = client.completions.create(prompt="x", stream=True, **ENDLESS | {"model": "checkpoint"})
            next(stream)
            terminal.type(CTRL_C)
            terminal.until("1 request still running, 9")  # of the 100 s some have passed
            terminal.type(CTRL_C)
            with pytest.raises(openai.APIError):
                list(stream)
        code, _ = terminal.end()
    assert code == 1
    assert terminal.shown.count("INFO") + terminal.shown.count("WARNING") == 2, terminal.shown
    assert "Traceback" not in terminal.shown


def test_clients_stay_when_an_expert_server_is_killed(
    commands: Commands, tmp_path: Path, start_server: StartServer
) -> None:
    servers = [start_server() for _ in range(2)]
    serve = start_serve(commands, tmp_path, "--experts", ",".join(each.address for each in servers))
    prompts = tasks.prompts(96, seed=11)

    async def ask(many: openai.AsyncOpenAI, prompt: str) -> str:
        text = ""
        async for part in await many.completions.create(prompt=prompt, stream=True, **GREEDY):
            text += part.choices[0].text
        return text

    async def together() -> list[str]:
        async with serve.clients() as many:
            answers = [asyncio.create_task(ask(many, prompt)) for prompt in prompts]
            await answers[0]
            os.kill(servers[1].process.pid, signal.SIGKILL)
            return list(await asyncio.gather(*answers))

    texts = asyncio.run(together())
    n_right = sum(tasks.check(prompt, text) for prompt, text in zip(prompts, texts, strict=True))
    assert n_right >= 95
    counts = serve.counts()
    assert (counts["failed"], counts["cancelled"], counts["finished"]) == (0, 0, len(prompts))
