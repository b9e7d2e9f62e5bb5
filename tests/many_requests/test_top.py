"""``moeoffload top`` as a process, beside a host that gives known figures."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from command_lines import ROOT, STEP_TIMEOUT_S, Commands, one_line_error, wait_until
from serving_snapshots import SnapshotServer, scripted, serving, with_figures

from moeoffload.cli.top_view import number, seconds

OPTIONS = ("--interval-s", "0.1")


def test_one_picture_shows_what_the_snapshots_say(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    snapshots = with_figures(scripted(2, n_layers=20))
    shown = snapshots[-1]["now"]
    with serving(SnapshotServer(snapshots)) as host:
        # In a process of its own: the others come from one that has the environment of its start.
        done = commands.run("moeoffload", "top", "--url", host.url, "--once", *OPTIONS, warm=False)
    assert (done.code, done.err) == (0, "")

    def figure(name: str) -> str:
        found = re.search(rf"{re.escape(name)} +([^│]+?) *│", done.out)
        assert found, f"no {name} in\n{done.out}"
        return found.group(1)

    assert figure("tokens/s") == number(shown["tokens_per_s"])
    for name, count in snapshots[-1]["requests"].items():
        assert figure(name) == str(count)
    assert figure("to the first token p95") == seconds(shown["first_token_s"][1])
    assert figure("between tokens p50") == seconds(shown["between_tokens_s"][0])
    for server, load in zip(snapshots[-1]["servers"], shown["servers"], strict=True):
        line = next(line for line in done.out.splitlines() if server["address"] in line)
        assert number(load["rows_per_s"]) in line
        assert server["state"] in line
    step = next(line for line in done.out.splitlines() if line.strip().startswith("a step"))
    assert step.rsplit("  ", 1)[-1].strip() == seconds(shown["step_s"])
    assert "layers 18-19" in done.out


def test_on_a_terminal_it_goes_on_until_ctrl_c_and_says_when_the_host_is_gone() -> None:
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "moeoffload.cli.host_app", "top", *OPTIONS]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "140", "LINES": "60"}
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, terminal)
        with serving(SnapshotServer(with_figures(scripted(3, n_layers=2)))) as host:
            top = subprocess.Popen(
                [*command, "--url", host.url], stdin=its_end, stdout=its_end, stderr=its_end, env=environment,
                cwd=ROOT, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )  # fmt: skip
            stack.callback(top.kill)
            os.close(its_end)
            shown = _read_until(terminal, "wait a call")
            shown += _read_until(terminal, "layer 1")
            wait_until(lambda: host.asked > 3, "the fourth look")
        _read_until(terminal, "no host answers")
        os.write(terminal, b"\x03")
        rest = _read_until(terminal, None)
        assert top.wait(60) == 130
    assert "Traceback" not in rest
    assert rest.rstrip().endswith("\x1b[?25h\x1b[?1049l")  # cursor and screen are back


def _read_until(terminal: int, words: str | None) -> str:
    """What a terminal shows up to ``words``, or up to its end."""
    text = ""
    while words is None or words not in text:
        ready, _, _ = select.select([terminal], [], [], STEP_TIMEOUT_S)
        assert ready, f"no {words} in {text[-2000:]}"
        try:
            data = os.read(terminal, 65536)
        except OSError:  # how Linux tells that nobody has the other end any more
            data = b""
        if not data:
            assert words is None, text
            break
        text += data.decode(errors="replace")
    return text


def test_a_key_is_sent_and_a_wrong_one_is_told(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("a-key-of-some-length\n")
    with serving(SnapshotServer(with_figures(scripted(2, n_layers=2)), key="a-key-of-some-length")) as host:
        arguments = ("top", "--url", host.url, "--once", *OPTIONS)
        assert commands.run("moeoffload", *arguments, "--api-key-file", file).code == 0
        refused = commands.run("moeoffload", *arguments)
    assert "--api-key-file" in one_line_error(refused, 5)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--url", "http://127.0.0.1:9"), 5, "no host answers"),
        (("--url", "127.0.0.1:8000"), 2, "--url"),
        (("--interval-s", "0"), 2, "--interval-s"),
        (("--api-key-file", "/nowhere/key"), 2, "--api-key-file"),
    ],
)
def test_what_cannot_be_is_one_line(commands: Commands, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = commands.run("moeoffload", "top", "--once", *arguments)
    assert words in one_line_error(done, code)


def test_another_server_is_told_from_a_host(commands: Commands) -> None:
    with serving(SnapshotServer([{"hello": 1}])) as host:
        done = commands.run("moeoffload", "top", "--once", "--url", host.url)
    assert "not of a moeoffload host" in one_line_error(done, 5)
