"""A running HTTP server over a fake engine, and OpenAI's client for it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPConnection
from typing import Any, cast

import openai
from command_lines import wait_until
from serving_snapshots import scripted

from many_requests.fake_engine import FakeEngine
from moeoffload.config import ServeSettings
from moeoffload.serve.access import bind_socket
from moeoffload.serve.api import create_app
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.server import HttpServer

WAIT_S = 30


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    headers: Message
    text: str

    @property
    def error(self) -> Any:
        return json.loads(self.text)["error"]


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    """One request; a ``body`` that is no text goes as JSON. A header named ``Content_Type`` is Content-Type."""
    connection = HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    content = body if isinstance(body, str | bytes) or body is None else json.dumps(body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with contextlib.closing(connection):
        connection.request(method, path, content, {"Content-Type": "application/json"} | named)
        response = connection.getresponse()
        return Reply(response.status, response.headers, response.read().decode())


@dataclass
class Running:
    """A server in a thread of this process."""

    engine: FakeEngine
    server: HttpServer
    thread: threading.Thread
    port: int
    key: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client, which would by itself try three times."""
        base: dict[str, Any] = {"base_url": f"{self.url}/v1", "api_key": self.key, "max_retries": 0, "timeout": WAIT_S}
        return openai.OpenAI(**base | options)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        return ask(self.port, method, path, body, **headers)

    @contextlib.contextmanager
    def leaving(self, path: str, body: Any) -> Iterator[None]:
        """A client that closes its connection at the end of the block, whatever it has read."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        try:
            yield
        finally:
            connection.close()

    def stop(self) -> None:
        """What a signal does."""
        self.server._loop.call_soon_threadsafe(self.server.stop)

    def ended(self) -> bool:
        return not self.thread.is_alive()


@contextlib.contextmanager
def serving(engine: FakeEngine, tokenizer: Any, key: str = "none", **settings: Any) -> Iterator[Running]:
    """``key`` is what the client shows; ``settings`` may demand one."""
    checked = ServeSettings(port=0, **settings)
    listener = bind_socket(checked)
    ready = threading.Event()
    served = cast(ServingEngine, engine)
    app, answering = create_app(served, tokenizer, "demo", checked, lambda watch: scripted(1)[0])
    server = HttpServer(app, answering, served, checked, ready.set)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    assert ready.wait(WAIT_S)
    running = Running(engine, server, thread, listener.getsockname()[1], key)
    try:
        yield running
    finally:
        engine.held = False
        if thread.is_alive():
            running.stop()
            running.stop()
        wait_until(running.ended, "the end of the server", WAIT_S)
        answering.close()
