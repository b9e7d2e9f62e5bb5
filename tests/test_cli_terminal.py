"""What ``moeoffload run`` shows of itself: each step on a terminal, one line after an answer, or nothing."""

from __future__ import annotations

import re

import pytest
import tasks
from command_lines import Commands
from conftest import DEMO, RunningServer
from terminals import CTRL_C, Terminal

OPTIONS = ("--device", "cpu", "--threads", "1")
BAR_GOES = "\x1b[2K"


def test_every_step_is_shown_and_log_lines_stay_whole() -> None:
    prompt = tasks.long_prompt(2000, seed=3)
    with Terminal("moeoffload", "run", DEMO, "--prompt", prompt, *OPTIONS, "-v", columns=70) as terminal:
        code, _ = terminal.end()
    assert code == 0, terminal.shown
    steps = (
        "importing torch and transformers", "reading the headers", "starting an expert server on cpu",
        "loading the dense layers", "loading 127.0.0.1", "prompt", "leaving the expert servers",
    )  # fmt: skip
    assert [step for step in steps if step not in terminal.shown] == []
    assert re.search(r"[1-9][0-9,]* of [0-9],[0-9]{3} tokens", terminal.shown), "a bar of tokens"
    logged = [line for line in terminal.shown.split("\r\n") if "INFO moeoffload." in line]
    assert logged
    for line in logged:
        # Alone in its line, once what the bar wrote there has been erased, and not wrapped to the terminal's width.
        assert line.rpartition(BAR_GOES)[2].startswith("INFO moeoffload."), repr(line)
    assert any(len(line.rpartition(BAR_GOES)[2]) > 70 for line in logged)


def test_ctrl_c_in_the_first_second_is_one_line() -> None:
    with Terminal("moeoffload", "run", DEMO, "--prompt", "hello", *OPTIONS) as terminal:
        terminal.until("importing torch")
        terminal.type(CTRL_C)
        code, rest = terminal.end()
    assert code == 130
    assert rest.endswith("\x1b[?25hinterrupted\r\n"), "and the cursor is back"
    assert "Traceback" not in terminal.shown


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), r"4 tokens · [0-9.e+]+ tokens/s · first after [0-9.]+ s · {} \(shared\)\n"),
        (("--max-new-tokens", "2"), r"2 tokens \(all that --max-new-tokens allows\) · .*\n"),
        (("--quiet",), ""),
    ],
)
def test_an_answer_leaves_one_line_of_figures_unless_quiet(
    commands: Commands, server: RunningServer, options: tuple[str, ...], line: str
) -> None:
    arguments = ("--prompt", "add 17 25 =", *OPTIONS, "--experts", server.address)
    done = commands.run("moeoffload", "run", DEMO, *arguments, *options)
    assert done.code == 0, done.err
    assert re.fullmatch(line.format(re.escape(server.address)), done.err), done.err
