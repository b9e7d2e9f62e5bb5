"""A running `moeoffload serve` with the demo checkpoint."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from command_lines import Command, Commands, wait_until
from conftest import DEMO
from models import secret_file

from many_requests.http_kit import Reply, ask

KEY = "0123456789abcdef0123"
RUNNING, WAITING = 32, 8


@dataclass
class Server:
    """A running `moeoffload serve`."""

    command: Command
    port: int

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=KEY, max_retries=0, timeout=60)

    def clients(self) -> openai.AsyncOpenAI:
        """For many at a time."""
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=100)

    def ask(self, method: str, path: str, body: Any = None) -> Reply:
        return ask(self.port, method, path, body, Authorization=f"Bearer {KEY}")

    def counts(self) -> Any:
        return json.loads(self.ask("GET", "/stats").text)["requests"]


def start(commands: Commands, folder: Path, *options: str) -> Server:
    words = ["--api-key-file", str(secret_file(folder / "key", KEY)), "--served-model-name", "demo"]
    words += ["--threads", "1", "--device", "cpu"]
    words += ["--server-memory-gib", "1", "--kv-gib", "0.02", "--port", "0", *options]
    command = commands.start("moeoffload", "serve", DEMO, *words)

    def said() -> bool:
        return command.ended or (command.out.exists() and command.out.read_text().endswith("\n"))

    wait_until(said, "the server", 120)
    line = re.fullmatch(r"serving demo at http://127\.0\.0\.1:([0-9]+)/v1\n", command.out.read_text())
    assert line is not None, command.err.read_text()
    return Server(command, int(line[1]))
