"""``moeoffload top`` as a process, beside a host that gives known figures."""

from __future__ import annotations

import contextlib
import re
import ssl
from pathlib import Path

import pytest
import typer
from command_lines import Commands, one_line_error, wait_until
from serving_snapshots import SnapshotServer, scripted, serving, with_figures
from terminals import CTRL_C, Terminal

from moeoffload.cli import top_app
from moeoffload.cli.key_files import make_keys
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
    with serving(SnapshotServer(snapshots)) as host:
        done = commands.run("moeoffload", "top", "--url", host.url, "--once", *OPTIONS, warm=False)
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
        with serving(SnapshotServer(with_figures(scripted(3, n_layers=2)))) as host:
            top = stack.enter_context(Terminal("moeoffload", "top", *OPTIONS, "--url", host.url))
            assert "wait a call" in top.until("layer 1")
            wait_until(lambda: host.asked > 3, "the fourth look")
        top.until("no host answers")
        top.type(CTRL_C)
        code, rest = top.end()
    assert code == 130
    assert "Traceback" not in rest
    assert rest.rstrip().endswith("\x1b[?25h\x1b[?1049linterrupted")  # cursor and screen are back


def test_a_key_is_sent_and_a_wrong_one_is_told(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("a-key-of-some-length\n")
    with serving(SnapshotServer(with_figures(scripted(2, n_layers=2)), key="a-key-of-some-length")) as host:
        arguments = ("top", "--url", host.url, "--once", *OPTIONS)
        assert commands.run("moeoffload", *arguments, "--api-key-file", file).code == 0
        refused = commands.run("moeoffload", *arguments)
    assert "--api-key-file" in one_line_error(refused, 5)


def test_an_https_host_is_checked_by_the_certificates_that_were_given(commands: Commands, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, [])
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(keys / "server.pem", keys / "server.key")
    with serving(SnapshotServer(with_figures(scripted(2, n_layers=2))), tls) as host:
        arguments = ("top", "--url", host.url, "--once", *OPTIONS)
        assert commands.run("moeoffload", *arguments, "--tls-ca", keys / "ca.pem").code == 0
        assert "--tls-ca" in one_line_error(commands.run("moeoffload", *arguments), 5)
        assert "holds no certificates" in one_line_error(commands.run("moeoffload", *arguments, "--tls-ca", keys), 2)


def test_misspelt_environment_names_are_told(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEOFFLOAD_LOG_LEVL", "debug")
    with serving(SnapshotServer(with_figures(scripted(2, n_layers=2)))) as host:
        done = commands.run("moeoffload", "top", "--url", host.url, "--once", *OPTIONS, warm=False)
    assert done.code == 0
    assert done.err.strip() == (
        "MOEOFFLOAD_LOG_LEVL is set, but there is no such setting; did you mean MOEOFFLOAD_LOG_LEVEL?"
    )


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


def test_another_server_is_told_from_a_host(commands: Commands) -> None:
    with serving(SnapshotServer([{"hello": 1}])) as host:
        done = commands.run("moeoffload", "top", "--once", "--url", host.url)
    assert "not of a moeoffload host" in one_line_error(done, 5)


def test_figures_of_another_version_are_told_from_ours(commands: Commands) -> None:
    (snapshot,) = with_figures(scripted(1, n_layers=2))
    del snapshot["memory"]
    with serving(SnapshotServer([snapshot])) as host:
        done = commands.run("moeoffload", "top", "--once", "--url", host.url, *OPTIONS)
    assert "of another version" in one_line_error(done, 5)
