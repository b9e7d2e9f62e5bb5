"""The dashboard in a real browser, and ``moeoffload top`` as a process: they show the figures of the snapshots."""

from __future__ import annotations

import contextlib
import html
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from command_lines import Commands, Result, one_line_error, wait_until
from models import demo_tokenizer, secret_file
from serving_snapshots import Told, scripted, with_figures
from terminals import CTRL_C, Terminal

from many_requests.http_kit import KEY, FakeEngine, Running, Snapshot, serving
from moeoffload.cli import top_app
from moeoffload.cli.key_files import make_keys
from moeoffload.cli.top_view import number, seconds
from moeoffload.serve.api_errors import unavailable
from moeoffload.serve.dashboard import dashboard_page
from moeoffload.serve.figures import LAYER_PARTS, PARTS

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
needs_browser = pytest.mark.skipif(not BROWSER, reason="no chromium here: apt-get install chromium")
UNITS = {"%": 0.01, "ms": 1e-3, "µs": 1e-6, "s": 1.0, "MiB": 1 << 20, "GiB": 1 << 30}
LATENCIES = {"ttft": "first_token_s", "itl": "between_tokens_s"}
DIGITS = 0.006
"""Figures are shown with three digits or as whole numbers."""


def showing(told: Snapshot, **settings: Any) -> contextlib.AbstractContextManager[Running]:
    """A host whose figures are told so."""
    return serving(FakeEngine(), demo_tokenizer(), snapshot=told, **settings)


class Page:
    """What the browser shows after ``seconds`` of its own time, which goes as fast as the server answers."""

    def __init__(self, url: str, seconds: int, folder: Path) -> None:
        command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--window-size=1280,1200"]
        command += [f"--virtual-time-budget={1000 * seconds}", "--dump-dom", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        self.complaints = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
        self.source = re.sub(r"<(script|style)>.*?</\1>", "", done.stdout, flags=re.S)

    def text(self, name: str) -> str:
        """All text within the element of this id."""
        start = re.search(rf'<(\w+)[^>]*\bid="{name}"[^>]*>', self.source)
        assert start, f"no element {name}"
        rest, depth = self.source[start.end() :], 1
        for tag in re.finditer(rf"<(/?){start.group(1)}\b[^>]*>", rest):
            depth += -1 if tag.group(1) else 1
            if depth == 0:
                return html.unescape(re.sub(r"<[^>]*>", "\n", rest[: tag.start()])).strip()
        raise AssertionError(f"element {name} has no end")

    def hides(self, name: str) -> bool:
        return re.search(rf'<[^>]*\bid="{name}"[^>]*\bhidden=""', self.source) is not None

    def figure(self, name: str) -> float | None:
        return figure(self.text(name))

    def row(self, table: str, head: str) -> list[str]:
        """The cells of the row of ``table`` that has ``head`` in its first."""
        rows = self.text(table).split(f"\n{head}\n")
        assert len(rows) == 2, self.text(table)
        return [cell for cell in rows[1].split("\n") if cell.strip()]


def figure(text: str) -> float | None:
    """The number that a text begins with, in seconds, bytes or as it is."""
    found = re.match(r"([\d,.]+) ?(%|ms|µs|s|MiB|GiB)?", text)
    return float(found.group(1).replace(",", "")) * UNITS.get(found.group(2), 1.0) if found else None


@needs_browser
def test_the_figures_are_those_of_the_snapshots(tmp_path: Path) -> None:
    snapshots = scripted(64, n_layers=5, model="<img src=x onerror=alert(1)>")
    for server in snapshots[0]["servers"] + snapshots[4]["servers"][:1]:
        del server["batches"]  # the first looks come before servers are asked
    snapshots = with_figures(snapshots)
    last, shown = snapshots[-1], snapshots[-1]["now"]
    told = Told(snapshots)
    with showing(told) as host:
        page = Page(f"{host.url}/dashboard", 70, tmp_path)
    assert page.complaints == []
    assert told.asked >= len(snapshots)
    names = ("tokens_per_s", "steps_per_s", "cache_use", "reuse", "rows_per_step", "members_per_batch")
    wanted: dict[str, float | None] = {name.replace("_", "-"): shown[name] for name in names}
    wanted |= {"prompt-per-s": shown["prompt_tokens_per_s"], "step": shown["step_s"]}
    wanted |= {f"{name}-p50": shown[figure][0] for name, figure in LATENCIES.items()}
    wanted |= {f"{name}-p95": shown[figure][1] for name, figure in LATENCIES.items()}
    wanted |= {f"part-{part}": shown["step_parts"][part] for part in PARTS}
    for name, value in wanted.items():
        assert page.figure(name) == pytest.approx(value, rel=DIGITS, abs=0.006), name
    for name, count in last["requests"].items():
        assert page.text(name) == str(count)
    for server, load in zip(last["servers"], shown["servers"], strict=True):
        state, busy, calls, rows, mib, wait, *_ = page.row("servers", server["address"])
        assert state.split()[1] == server["state"]
        for cell, name in {busy: "busy", calls: "calls_per_s", rows: "rows_per_s", wait: "wait_s"}.items():
            assert figure(cell) == pytest.approx(load[name], rel=DIGITS, abs=0.006)
        assert figure(mib) == pytest.approx(load["bytes_per_s"] / (1 << 20), rel=DIGITS)
    for n, layer in enumerate(shown["layers"]):
        cells = page.row("layer-table", str(n))[: len(LAYER_PARTS)]
        for cell, part in zip(cells, LAYER_PARTS, strict=True):
            assert figure(cell) == pytest.approx(layer[part], rel=DIGITS)
    assert "<img" not in page.source  # what a server says is text
    assert "<img src=x" in page.text("model")
    assert "replaced by this host" in page.text("servers")
    assert "live, 1 of 2 servers away" in page.text("status")


@needs_browser
def test_it_says_when_nothing_runs(tmp_path: Path) -> None:
    snapshot = scripted(1, n_layers=2)[0]
    snapshot["requests"] |= {"running": 0, "waiting": 0}
    snapshot["servers"] = []
    [snapshot] = with_figures([snapshot])
    with showing(Told([snapshot])) as host:
        page = Page(f"{host.url}/dashboard", 3, tmp_path)
    assert page.complaints == []
    assert "nothing runs" in page.text("status")
    assert not page.hides("no-servers")
    assert "No layer was timed" in page.text("no-layers")


@needs_browser
def test_without_a_key_it_asks_for_one_and_takes_that_of_the_address(tmp_path: Path) -> None:
    told, key_file = Told(with_figures(scripted(3, n_layers=2))), secret_file(tmp_path / "key", f"{KEY}&more")
    with showing(told, api_key_file=key_file) as host:
        refused = Page(f"{host.url}/dashboard", 3, tmp_path / "without")
        assert told.asked == 0
        allowed = Page(f"{host.url}/dashboard?key={KEY}%26more", 3, tmp_path / "with")
    assert not refused.hides("key-form")
    assert refused.hides("main")
    assert allowed.hides("key-form")
    assert "live" in allowed.text("status")


@needs_browser
def test_it_says_that_the_server_cannot_be_reached(tmp_path: Path) -> None:
    class Ending(Told):
        def __call__(self, watch: bool) -> dict[str, Any]:
            if self.asked == 2:
                raise unavailable("no more of this", 1.0)
            return super().__call__(watch)

    with showing(Ending(with_figures(scripted(4, n_layers=2)))) as host:
        page = Page(f"{host.url}/dashboard", 8, tmp_path)
    assert "not reachable" in page.text("status")
    assert "cannot be reached" in page.text("notice")
    assert "503" in page.text("notice")
    assert not page.hides("main")  # the last figures stay


def test_the_page_asks_for_nothing_outside() -> None:
    page = dashboard_page()
    assert "{{" not in page
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}  # the name of SVG
    assert not re.findall(r"<(?:link|script|img|iframe)[^>]+(?:src|href)=\"(?!data:,)", page)
    assert "default-src 'none'" in page
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", page)


OPTIONS = ("--interval-s", "0.1")
MISSPELT = "MOEOFFLOAD_LOG_LEVL is set, but there is no such setting; did you mean MOEOFFLOAD_LOG_LEVEL?\n"


def once(commands: Commands, url: str, *words: str | Path, **how: Any) -> Result:
    """What ``moeoffload top`` shows of a host and ends; also of what is not one."""
    return commands.run("moeoffload", "top", "--url", url, "--once", *OPTIONS, *words, **how)


def test_one_picture_shows_what_the_snapshots_say(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("MOEOFFLOAD_LOG_LEVL", "debug")
    snapshots = with_figures(scripted(2, n_layers=20))
    shown = snapshots[-1]["now"]
    with showing(Told(snapshots)) as host:
        # In a process of its own: the others come from one that has the environment of its start.
        done = once(commands, host.url, warm=False)
    assert (done.code, done.err) == (0, MISSPELT)

    def figure(name: str) -> str:
        found = re.search(rf"{re.escape(name)} +([^│]+?) *│", done.out)
        assert found, f"no {name} in\n{done.out}"
        return found.group(1)

    assert figure("tokens/s") == number(shown["tokens_per_s"])
    for name, count in snapshots[-1]["requests"].items():
        assert figure(name) == str(count)
    assert figure("memory of the host, GiB") == "9.00 of 23.0"
    assert figure("to the first token p95") == seconds(shown["first_token_s"][1])
    assert figure("between tokens p50") == seconds(shown["between_tokens_s"][0])
    for server, load in zip(snapshots[-1]["servers"], shown["servers"], strict=True):
        line = next(line for line in done.out.splitlines() if server["address"] in line)
        assert number(load["rows_per_s"]) in line
        assert server["state"] in line
        assert "61.0 of 79.0" in line
    step = next(line for line in done.out.splitlines() if line.strip().startswith("a step"))
    assert step.rsplit("  ", 1)[-1].strip() == seconds(shown["step_s"])
    assert "layers 18-19" in done.out


LONG_NAME = "gpu-node-07.cluster.example.org:50051"


@pytest.mark.parametrize("address", ["192.168.100.201:50051", LONG_NAME, "a" * 60 + ":50051"])
def test_eighty_columns_cut_no_name_and_no_figure(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # a pipe has 80
    snapshots = with_figures(scripted(2, n_layers=20))
    for snapshot in snapshots:
        snapshot["servers"][0]["address"] = address
    with showing(Told(snapshots)) as host:
        done = once(commands, host.url, warm=False)
    assert (done.code, done.err) == (0, "")
    assert "…" not in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    lines = done.out[done.out.index("expert servers") :].splitlines()
    first = next(line for line in lines if line.strip().startswith(address[:20]))
    load = snapshots[-1]["now"]["servers"][0]
    assert seconds(load["wait_s"]) in first
    if len(address) < 40:
        assert address in first
    else:
        following = lines[lines.index(first) + 1]
        assert first.split()[0] + following.split()[0] == address
    step = next(line for line in lines if line.strip().startswith("a step"))
    assert step.rsplit("  ", 1)[-1].strip().endswith(seconds(snapshots[-1]["now"]["step_s"]))


def test_on_a_terminal_it_goes_on_until_ctrl_c_and_says_when_the_host_is_gone() -> None:
    with contextlib.ExitStack() as stack:
        told = Told(with_figures(scripted(3, n_layers=2)))
        with showing(told) as host:
            top = stack.enter_context(Terminal("moeoffload", "top", *OPTIONS, "--url", host.url))
            assert "wait a call" in top.until("layer 1")
            wait_until(lambda: told.asked > 3, "the fourth look")
        top.until("no host answers")
        top.type(CTRL_C)
        code, rest = top.end()
    assert code == 130
    assert "Traceback" not in rest
    assert rest.rstrip().endswith("\x1b[?25h\x1b[?1049linterrupted")  # cursor and screen are back


def test_a_key_is_sent_and_a_wrong_one_is_told(commands: Commands, tmp_path: Path) -> None:
    file = secret_file(tmp_path / "key", KEY + "\n")
    with showing(Told(with_figures(scripted(2, n_layers=2))), api_key_file=file) as host:
        assert once(commands, host.url, "--api-key-file", file).code == 0
        assert "--api-key-file" in one_line_error(once(commands, host.url), 5)


def test_an_https_host_is_checked_by_the_certificates_that_were_given(commands: Commands, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, [])
    tls = {"http_tls_cert": keys / "server.pem", "http_tls_key": keys / "server.key"}
    with showing(Told(with_figures(scripted(2, n_layers=2))), **tls) as host:
        url = host.url.replace("http", "https")
        assert once(commands, url, "--tls-ca", keys / "ca.pem").code == 0
        assert "--tls-ca" in one_line_error(once(commands, url), 5)
        assert "holds no certificates" in one_line_error(once(commands, url, "--tls-ca", keys), 2)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--url", "http://no-such-host.invalid"), 5, "no machine of that name is known"),
        (("--url", "http://127.0.0.1:9"), 5, "no host answers"),
        (("--url", "127.0.0.1:8000"), 2, "--url"),
        (("--url", "http://[::1"), 2, "--url"),
        (("--interval-s", "0"), 2, "--interval-s"),
        (("--api-key-file", "/nowhere/key"), 2, "--api-key-file"),
    ],
)
def test_what_cannot_be_is_one_line(commands: Commands, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = commands.run("moeoffload", "top", "--once", *arguments)
    assert words in one_line_error(done, code)


def test_a_name_that_is_not_resolved_in_time_is_not_waited_for(
    unresolved: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top_app, "ANSWER_S", 0.1)
    with pytest.raises(typer.Exit) as ended:
        top_app.top(url="http://a-name", once=True)
    assert unresolved == [], "it was not waited for"
    assert ended.value.exit_code == 5
    assert "no host answers (timed out)" in capsys.readouterr().err


def test_another_server_and_figures_of_another_version_are_told_from_ours(commands: Commands) -> None:
    (older,) = with_figures(scripted(1, n_layers=2))
    del older["memory"]
    for snapshot, words in (({"hello": 1}, "not of a moeoffload host"), (older, "of another version")):
        with showing(Told([snapshot])) as host:
            assert words in one_line_error(once(commands, host.url), 5)
