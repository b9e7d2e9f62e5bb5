"""`moeoffload serve` when more comes than it takes, and when an expert server dies under it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import openai
import psutil
import tasks
from command_lines import Commands, wait_until
from conftest import StartServer

from .test_serve_process import GREEDY, KEY, start

N_OFFERED = 256


def clients(port: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=100)


def test_256_at_once_are_answered_or_told_to_come_again(commands: Commands, tmp_path: Path) -> None:
    server = start(commands, tmp_path, "--max-running", "8", "--max-waiting", "24")
    process = psutil.Process(server.command.process.pid)
    options: dict[str, Any] = {"prompt": "x", "max_tokens": 60, "extra_body": {"ignore_eos": True}, **GREEDY}

    async def offer() -> list[Any]:
        async with clients(server.port) as many:
            await many.completions.create(**options)
            asked = (many.completions.create(**options) for _ in range(N_OFFERED))
            return await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(offer())  # connections and buffers are made once
    before = process.memory_info().rss
    told = asyncio.run(offer())
    refused = [each for each in told if isinstance(each, openai.RateLimitError)]
    answered = [each for each in told if not isinstance(each, BaseException)]
    assert len(refused) + len(answered) == N_OFFERED
    assert len(answered) >= 32
    assert refused
    assert all(int(each.response.headers["Retry-After"]) >= 1 for each in refused)
    assert {each.choices[0].finish_reason for each in answered} == {"length"}
    assert {each.usage.completion_tokens for each in answered} == {60}
    assert process.memory_info().rss - before < 64 << 20
    wait_until(lambda: server.counts()["running"] == server.counts()["waiting"] == 0, "the end of all", 10)


def test_clients_stay_when_an_expert_server_is_killed(
    commands: Commands, tmp_path: Path, start_server: StartServer
) -> None:
    servers = [start_server() for _ in range(2)]
    serve = start(commands, tmp_path, "--experts", ",".join(each.address for each in servers))
    prompts = tasks.prompts(96, seed=11)

    async def ask(many: openai.AsyncOpenAI, prompt: str) -> str:
        text = ""
        async for part in await many.completions.create(prompt=prompt, stream=True, **GREEDY):
            text += part.choices[0].text
        return text

    async def together() -> list[str]:
        async with clients(serve.port) as many:
            answers = [asyncio.create_task(ask(many, prompt)) for prompt in prompts]
            await answers[0]
            os.kill(servers[1].process.pid, signal.SIGKILL)
            return list(await asyncio.gather(*answers))

    texts = asyncio.run(together())
    n_right = sum(tasks.check(prompt, text) for prompt, text in zip(prompts, texts, strict=True))
    assert n_right >= 95
    counts = serve.counts()
    assert (counts["failed"], counts["cancelled"], counts["finished"]) == (0, 0, len(prompts))
