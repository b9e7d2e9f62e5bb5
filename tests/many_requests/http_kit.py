"""HTTP servers over an engine without a model, which says what a test tells it to; the real process; their clients."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast

import anthropic
import openai
from command_lines import Command, Commands, wait_until
from conftest import DEMO
from models import secret_file
from serving_snapshots import Told, scripted

from moeoffload.config import ServeSettings
from moeoffload.errors import BusyError
from moeoffload.serve.access import bind_socket
from moeoffload.serve.api import create_app
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.request import FinishReason, OnProgress, Progress, SamplingOptions, TokenChoice
from moeoffload.serve.server import HttpServer

HI: list[Any] = [{"role": "user", "content": "hi"}]
EOS = 256
"""Of the demo checkpoint, whose other tokens are bytes."""
WAIT_S = 60


def tokens_of(text: str) -> list[int]:
    return [*text.encode(), EOS]


def form(schema: dict[str, Any]) -> dict[str, Any]:
    """The ``response_format`` of answers that are valid by a schema."""
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


@dataclass
class FakeTicket:
    """A request; `events` are what has been told of it."""

    request_id: str
    prompt: list[int]
    options: SamplingOptions
    on_progress: OnProgress
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: bool = False

    def tell(self, progress: Progress) -> None:
        self.ended = progress.finish is not None
        self.on_progress(progress)


class FakeEngine:
    """Does what `ServingEngine` does for the HTTP server. While `held`, requests stay, as long ones do."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.context_tokens, self.n_vocabulary, self.eos = 200, 258, (EOS,)
        self.sampling_defaults: dict[str, float] = {}
        self.n_refused = 0
        self.is_ready = True
        self.failure: BaseException | None = None
        self.tokens = list(tokens)
        self.error: Exception | None = None
        """Told after the tokens, instead of an end."""
        self.room = 1000
        self.reused_tokens = 0
        self.held = False
        self.tickets: list[FakeTicket] = []
        self._numbers = itertools.count()

    def note_refused(self) -> None:
        self.n_refused += 1

    def submit(self, prompt: list[int], options: SamplingOptions, on_progress: OnProgress) -> FakeTicket:
        if len(self.tickets) >= self.room:
            raise BusyError("the queue is full", 3.2)
        ticket = FakeTicket(f"r{next(self._numbers)}", prompt, options, on_progress)
        self.tickets.append(ticket)
        threading.Thread(target=self._answer, args=(ticket,), daemon=True).start()
        return ticket

    def cancel(self, ticket: FakeTicket, *, complete: bool = False) -> None:
        ticket.cancelled.set()

    def all_cancelled(self) -> bool:
        return all(ticket.cancelled.is_set() for ticket in self.tickets)

    def drain(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not all(ticket.ended for ticket in self.tickets):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _answer(self, ticket: FakeTicket) -> None:
        options = ticket.options
        if options.with_prompt:
            ticket.tell(Progress(prompt=tuple(TokenChoice(token, -0.5) for token in ticket.prompt)))
        for number, token in enumerate(self.tokens):
            if ticket.cancelled.is_set():
                break
            finish = FinishReason.STOP if token == EOS and not options.ignore_eos else None
            if finish is None and number + 1 == options.max_tokens:
                finish = FinishReason.LENGTH
            ticket.tell(Progress(self._choice(token, options), finish, reused_tokens=self.reused_tokens))
            if finish is not None:
                return
        while self.held and not ticket.cancelled.wait(0.01):
            pass
        if ticket.cancelled.is_set():
            ticket.tell(Progress(finish=FinishReason.CANCELLED))
        elif self.error is not None:
            ticket.tell(Progress(finish=FinishReason.ERROR, error=self.error))
        else:
            ticket.tell(Progress(finish=FinishReason.LENGTH))

    @staticmethod
    def _choice(token: int, options: SamplingOptions) -> TokenChoice:
        if options.alternatives is None:
            return TokenChoice(token)
        others = tuple((other, -float(other)) for other in range(1, options.alternatives + 1))
        return TokenChoice(token, -0.5, others)


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    headers: Message
    text: str

    @property
    def error(self) -> Any:
        return json.loads(self.text)["error"]


@dataclass
class Http:
    """A server at a port of loopback, and its clients. Those of OpenAI and Anthropic would by themselves try three
    times; what they answer is not typed here: which fields are there is what tests look at."""

    port: int
    key: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> Any:
        base: dict[str, Any] = {"base_url": f"{self.url}/v1", "api_key": self.key, "max_retries": 0, "timeout": WAIT_S}
        return openai.OpenAI(**base | options)

    def clients(self) -> openai.AsyncOpenAI:
        """For many requests at a time."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=100)

    def anthropic(self, key: str = "") -> Any:
        return anthropic.Anthropic(base_url=self.url, api_key=key or self.key, max_retries=0, timeout=WAIT_S)

    def chat(self, messages: list[Any] = HI, **options: Any) -> Any:
        """The answer to a chat, or all chunks of a stream."""
        with self.client() as client:
            answer = client.chat.completions.create(**{"model": "demo", "messages": messages} | options)
            return list(answer) if options.get("stream") else answer

    def complete(self, prompt: Any = "x", **options: Any) -> Any:
        """The completion of a prompt, or all parts of a stream."""
        with self.client() as client:
            answer = client.completions.create(**{"model": "demo", "prompt": prompt} | options)
            return list(answer) if options.get("stream") else answer

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """One request; a ``body`` that is no text goes as JSON. A header named ``Content_Type`` is Content-Type."""
        content = body if isinstance(body, str | bytes) or body is None else json.dumps(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)) as connection:
            connection.request(method, path, content, {"Content-Type": "application/json"} | named)
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read().decode())


@dataclass
class Running(Http):
    """A server in a thread of this process."""

    engine: FakeEngine
    server: HttpServer
    thread: threading.Thread

    @contextlib.contextmanager
    def leaving(self, path: str, body: Any) -> Iterator[None]:
        """A client that closes its connection at the end of the block, whatever it has read."""
        with contextlib.closing(HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)) as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            yield

    def stop(self) -> None:
        """What a signal does."""
        self.server._loop.call_soon_threadsafe(self.server.stop)

    def ended(self) -> bool:
        return not self.thread.is_alive()


Snapshot = Callable[[bool], dict[str, Any]]


@contextlib.contextmanager
def serving(
    engine: FakeEngine, tokenizer: Any, key: str = "none", snapshot: Snapshot = Told(scripted(1)), **settings: Any
) -> Iterator[Running]:
    """``key`` is what the client shows; ``settings`` may demand one. ``snapshot`` gives the figures."""
    checked = ServeSettings(port=0, **settings)
    listener = bind_socket(checked)
    ready = threading.Event()
    served = cast(ServingEngine, engine)
    app, answering = create_app(served, tokenizer, "demo", checked, snapshot)
    server = HttpServer(app, answering, served, checked, ready.set)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    assert ready.wait(WAIT_S)
    running = Running(listener.getsockname()[1], key, engine, server, thread)
    try:
        yield running
    finally:
        engine.held = False
        if thread.is_alive():
            running.stop()
            running.stop()
        wait_until(running.ended, "the end of the server", WAIT_S)
        answering.close()


KEY = "0123456789abcdef0123"
RUNNING, WAITING = 32, 8


@dataclass
class Process(Http):
    """A running `moeoffload serve` with the demo checkpoint."""

    command: Command

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """With the key."""
        return super().ask(method, path, body, Authorization=f"Bearer {KEY}", **headers)

    def counts(self) -> Any:
        return json.loads(self.ask("GET", "/stats").text)["requests"]


def start_serve(commands: Commands, folder: Path, *options: str) -> Process:
    words = ["--api-key-file", str(secret_file(folder / "key", KEY)), "--served-model-name", "demo"]
    words += ["--threads", "1", "--device", "cpu"]
    words += ["--server-memory-gib", "1", "--kv-gib", "0.02", "--port", "0", *options]
    command = commands.start("moeoffload", "serve", DEMO, *words)

    def said() -> bool:
        return command.ended or (command.out.exists() and command.out.read_text().endswith("\n"))

    wait_until(said, "the server", 120)
    line = re.fullmatch(r"serving demo at http://127\.0\.0\.1:([0-9]+)/v1\n", command.out.read_text())
    assert line is not None, command.err.read_text()
    return Process(int(line[1]), KEY, command)
