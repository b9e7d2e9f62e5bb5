"""Who and what the HTTP server does not let in, and how it says so: OpenAI's errors."""

from __future__ import annotations

import copy
import json
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from command_lines import wait_until
from models import secret_file

from many_requests.http_kit import HI, KEY, FakeEngine, Running, form, serving, tokens_of
from moeoffload.cli.key_files import make_keys
from moeoffload.config import ServeSettings
from moeoffload.errors import SettingError
from moeoffload.serve import server as http_server
from moeoffload.serve.access import check_access

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MISSING: Any = object()


@pytest.fixture(scope="module")
def server(tokenizer: Any) -> Iterator[Running]:
    with serving(FakeEngine(tokens_of("yes")), tokenizer) as running:
        yield running


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return secret_file(tmp_path / "key", KEY + "\n")


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
UNMAKEABLE = TOOL | {"function": {"name": "a", "parameters": {"not": {}}}}
FORM, SCHEMA = "response_format", "response_format.json_schema.schema"
DEEP: dict[str, Any] = {}
for _ in range(150):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("path", "change", "param", "words"),
    [
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (CHAT, {"messages": "hi"}, "messages", "list"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'user'"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
        (CHAT, {"messages": [HI[0] | {"content": [{"type": "image_url"}]}]}, "messages[0].content", "only text"),
        (CHAT, {"messages": None}, "messages", "list"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "greater"),
        (CHAT, {"max_completion_tokens": "9"}, "max_completion_tokens", "integer"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "'logprobs'"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        (CHAT, {"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "'required'"),
        (CHAT, {"tools": [TOOL], "tool_choice": TOOL | {"function": {"name": "x"}}}, "tool_choice", "none of"),
        (CHAT, {"tools": [TOOL], "guided_regex": "a"}, "tools", "together"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "together"),
        (CHAT, {"tools": [TOOL | {"function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        (CHAT, {"tools": [UNMAKEABLE], "tool_choice": "required"}, "tools", "not"),
        (CHAT, {"audio": {"voice": "x"}}, "audio", "Unsupported"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions", "Unsupported"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "'stream'"),
        (CHAT, {"chat_template_kwargs": {"a": []}}, None, "Invalid"),
        (CHAT, {FORM: form({"type": "strange"})}, SCHEMA, "strange"),
        (CHAT, {FORM: form({"not": {}})}, SCHEMA, "not"),
        (CHAT, {FORM: form({"$ref": "http://x/y"})}, SCHEMA, "http"),
        (CHAT, {FORM: form({"enum": []})}, SCHEMA, "nsatisfiable"),
        (CHAT, {FORM: form(DEEP)}, SCHEMA, "recursion"),
        (CHAT, {FORM: form({"title": "x" * 70_000})}, SCHEMA, "larger"),
        (CHAT, {FORM: form({"type": "integer", "multipleOf": 999_983})}, None, "multipleOf"),
        (CHAT, {FORM: form({"multipleOf": 10**400})}, SCHEMA, "out of range"),
        (CHAT, {FORM: form({"multipleOf": True})}, SCHEMA, "multipleOf"),
        (CHAT, {FORM: {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
        (CHAT, {FORM: {"type": "xml"}}, "response_format.type", "json_object"),
        (CHAT, {"guided_regex": "(a"}, "guided_regex", "unclosed"),
        (CHAT, {"guided_regex": "a(?=b)"}, "guided_regex", "look-around"),
        (CHAT, {"guided_regex": "\ud800"}, "guided_regex", "unicode"),
        (CHAT, {"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "not permitted"),
        (CHAT, {"guided_regex": "a", FORM: {"type": "json_object"}}, FORM, "together"),
        (CHAT, {"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "together"),
        (TEXT, {"prompt": None}, "prompt", "string"),
        (TEXT, {"prompt": []}, "prompt", "string"),
        (TEXT, {"prompt": ""}, "prompt", "empty"),
        (TEXT, {"prompt": [1, "a"]}, "prompt", "string"),
        (TEXT, {"prompt": [300]}, "prompt", "0 to 257"),
        (TEXT, {"prompt": ["x"] * 97}, "prompt", "At most 96"),
        (TEXT, {"prompt": "\ud800"}, None, "Unicode"),
        (TEXT, {"n": 17}, "n", "16"),
        (TEXT, {"n": 2, "best_of": 3}, "best_of", "'n'"),
        (TEXT, {"suffix": "x"}, "suffix", "Unsupported"),
        (TEXT, {"temperature": 2.5}, "temperature", "2"),
        (TEXT, {"temperature": float("nan")}, "temperature", "finite"),
        (TEXT, {"top_p": "all"}, "top_p", "number"),
        (TEXT, {"stop": ["a"] * 5}, "stop", "at most 4"),
        (TEXT, {"stop": [""]}, "stop[0]", "at least 1 character"),
        (TEXT, {"seed": 2**63}, "seed", "less"),
        (TEXT, {"logit_bias": {"258": 1}}, "logit_bias", "0 to 257"),
        (TEXT, {"logit_bias": {"x": 1}}, "logit_bias.x", "[0-9]"),
        (TEXT, {"logit_bias": {"1": 101}}, "logit_bias", "100"),
        (TEXT, {"frequency_penalty": -3}, "frequency_penalty", "-2"),
        (TEXT, {"min_p": 1.1}, "min_p", "1"),
        (TEXT, {"repetition_penalty": 0}, "repetition_penalty", "greater"),
        (TEXT, {"no_such": 1}, "no_such", "Unknown parameter"),
        (TEXT, {"model": None}, "model", "string"),
        (TEXT, {"prompt": MISSING}, "prompt", "Missing required"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    server: Running, path: str, change: dict[str, Any], param: str | None, words: str
) -> None:
    base: dict[str, Any] = {"model": "demo"} | ({"messages": HI} if path == CHAT else {"prompt": "x"})
    body = {name: value for name, value in (base | change).items() if value is not MISSING}
    reply = server.ask("POST", path, body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert words in reply.error["message"]
    if param is not None:
        assert reply.error["param"] == param


@pytest.mark.parametrize(
    "body", ['{"model": ', "", "[1]", '"x"', "[" * 100_000, '{"model": ' + "9" * 5000, b"\xff\xfe"]
)
def test_a_body_that_is_no_json_object_is_400(server: Running, body: str | bytes) -> None:
    reply = server.ask("POST", CHAT, body)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")


def test_what_is_nested_too_deeply_is_400(tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ messages | tojson(indent=4) }}"
    deep = '{"a": ' * 700 + "1" + "}" * 700
    with serving(FakeEngine(), tokenizer) as server:
        body = f'{{"model": "demo", "messages": [{{"role": "user", "content": "x", "more": {deep}}}]}}'
        reply = server.ask("POST", CHAT, body)
    assert (reply.status, "nested" in reply.error["message"]) == (400, True)


def test_more_answers_than_there_are_places_are_not_told_to_come_again(tokenizer: Any) -> None:
    with serving(FakeEngine(), tokenizer, max_running=2, max_waiting=3) as server:
        for path, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "x"})):
            reply = server.ask("POST", path, {"model": "demo", "n": 6} | body)
            assert (reply.status, reply.error["param"]) == (400, "n")


def test_too_long_prompts_are_400_with_openai_s_code(server: Running) -> None:
    for ask_for in (
        lambda: server.chat([{"role": "user", "content": "x" * 200}]),
        lambda: server.complete("x" * 150, max_tokens=51),
    ):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 200 tokens") as caught:
            ask_for()
        assert caught.value.code == "context_length_exceeded"
    assert server.complete("x" * 199).choices[0].text == "y"


def test_other_models_and_routes_are_404(server: Running) -> None:
    with server.client() as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").id == "demo"
        for ask_for in (lambda: client.models.retrieve("org/other"), lambda: server.complete(model="other")):
            with pytest.raises(openai.NotFoundError) as caught:
                ask_for()
            assert caught.value.code == "model_not_found"
    assert server.ask("GET", "/v1/files").error["code"] == "unknown_url"
    assert server.ask("GET", CHAT).status == 405
    assert server.ask("GET", "/docs").status == 404


def test_a_large_body_is_413_and_not_kept(server: Running) -> None:
    reply = server.ask("POST", TEXT, {"model": "demo", "prompt": "x" * (9 << 20)})
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    with socket.create_connection(("127.0.0.1", server.port), 10) as peer:
        peer.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n")
        assert peer.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "attacker.example"}, "invalid_host"),
        ({"Host": "127.0.0.1.attacker.example"}, "invalid_host"),
        ({"Host": ""}, "invalid_host"),
        ({"Origin": "https://attacker.example"}, "invalid_origin"),
        ({"Origin": "null"}, "invalid_origin"),
    ],
)
def test_pages_of_other_sites_in_a_browser_here_are_kept_out(
    server: Running, headers: dict[str, str], code: str
) -> None:
    reply = server.ask("GET", "/v1/models", **headers)
    assert (reply.status, reply.error["code"]) == (403, code)
    assert "Access-Control-Allow-Origin" not in reply.headers
    for own in ({"Host": "localhost:1"}, {"Host": "[::1]:1"}, {"Origin": "http://127.0.0.1:8000"}):
        assert server.ask("GET", "/v1/models", **own).status == 200
    form = json.dumps({"model": "demo", "prompt": "x"})
    assert server.ask("POST", TEXT, form, Content_Type="text/plain").status == 400


def test_the_key_opens_all_but_what_says_that_the_server_is_there(tokenizer: Any, key_file: Path) -> None:
    with serving(FakeEngine(tokens_of("yes")), tokenizer, KEY, api_key_file=key_file) as server:
        assert server.complete().choices[0].text == "yes"
        with server.client(api_key=KEY[:-1]) as client, pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(model="demo", prompt="x")
        assert caught.value.code == "invalid_api_key"
        for path in ("/v1/models", "/metrics", "/stats", "/no-such"):
            assert server.ask("GET", path).status == 401
            assert server.ask("GET", path, Authorization=f"Basic {KEY}").status == 401
            assert server.ask("GET", path, Authorization="Bearer \xfc").status == 401
            known = server.ask("GET", path, Authorization=f"Bearer {KEY}")
            assert known.status == (404 if path == "/no-such" else 200)
        for path in ("/health", "/ready", "/dashboard"):
            assert server.ask("GET", path).status == 200
        for path in ("/health", "/ready"):
            assert server.ask("HEAD", path).status == 200
        # Who knows the key may use any name of this machine: it may stand behind a proxy.
        assert server.ask("GET", "/v1/models", Host="any.example", Authorization=f"Bearer {KEY}").status == 200


def test_no_key_is_in_the_log(tokenizer: Any, key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"), serving(FakeEngine(), tokenizer, KEY, api_key_file=key_file) as server:
        assert server.ask("GET", f"/dashboard?key={KEY}").status == 200
        assert server.ask("GET", "/stats", Authorization=f"Bearer {KEY}").status == 200
        assert server.ask("GET", "/stats", Authorization=f"Bearer {KEY}x").status == 401
    assert "GET /dashboard 200" in caplog.text
    assert "no API key" in caplog.text
    assert KEY not in caplog.text


def test_clients_see_the_certificate(tokenizer: Any, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", [])
    cert, key, ca = (tmp_path / "keys" / name for name in ("server.pem", "server.key", "ca.pem"))
    with serving(FakeEngine(), tokenizer, http_tls_cert=cert, http_tls_key=key) as server:
        trust = ssl.create_default_context(cafile=ca)
        with urllib.request.urlopen(f"https://localhost:{server.port}/health", context=trust, timeout=10) as reply:
            assert json.load(reply) == {"status": "ok"}


def test_files_that_hold_something_else_are_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    junk = secret_file(tmp_path / "junk", "short")
    with pytest.raises(SettingError, match=r"--api-key-file: .* holds no token"):
        check_access(ServeSettings(api_key_file=junk))
    with pytest.raises(SettingError, match=r"--http-tls-cert and --http-tls-key: .* no certificate"):
        check_access(ServeSettings(http_tls_cert=junk, http_tls_key=junk))


def test_connections_that_send_no_request_are_closed_and_slow_answers_are_not(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.3)
    engine = FakeEngine(b"abc")
    engine.held = True
    with serving(engine, tokenizer) as server, server.client() as client:
        stream = client.chat.completions.create(model="demo", messages=HI, stream=True)
        next(stream)
        for begin in (b"", b"GET /health HTTP/1.1\r\nHo", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he"):
            with socket.create_connection(("127.0.0.1", server.port), 10) as peer:
                peer.sendall(begin)
                while peer.recv(1000):
                    pass
        engine.held = False
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "abc"


def test_requests_that_do_not_finish_in_time_are_told(tokenizer: Any) -> None:
    engine = FakeEngine(b"abc")
    engine.held = True
    with serving(engine, tokenizer, drain_seconds=0.2) as server, server.client() as client:
        stream = client.chat.completions.create(model="demo", messages=HI, stream=True)
        next(stream)
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(list, stream)
            server.stop()
            wait_until(server.ended, "the end", 20)
            assert not server.server.finished_all
            with pytest.raises(openai.APIError, match="given this request up"):
                rest.result(10)
        assert engine.tickets[0].cancelled.is_set()


def test_an_engine_that_is_not_ready_is_503(tokenizer: Any) -> None:
    engine = FakeEngine()
    engine.is_ready = False
    with serving(engine, tokenizer) as server:
        assert server.ask("GET", "/ready").status == 503
        reply = server.ask("POST", TEXT, {"model": "demo", "prompt": "x"})
        assert (reply.status, reply.error["type"]) == (503, "server_error")
        assert server.ask("GET", "/health").status == 200
        engine.failure = ZeroDivisionError("a secret")
        health = server.ask("GET", "/health")
        assert (health.status, json.loads(health.text)) == (503, {"status": "the engine has failed"})
