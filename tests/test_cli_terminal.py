"""What ``moeoffload run`` and ``chat`` show, on a terminal or piped; turns compute only what is new."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tasks
from command_lines import Commands
from conftest import DEMO, RunningServer, local_model
from models import endless_model
from terminals import CTRL_C, Terminal

from moeoffload.errors import PromptError
from moeoffload.host.generate import Conversation, Ending, StoppedError, Watch, prepare_chat
from moeoffload.host.session import OffloadedModel, open_model

OPTIONS = ("--device", "cpu", "--threads", "1")
BAR_GOES = "\x1b[2K"
ESCAPE = r"\x1b\[[0-9;?]*[A-Za-z]"


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
    bars = [re.sub(ESCAPE, "", line) for line in re.split(r"[\r\n]+", terminal.shown) if "━" in line]
    assert bars
    assert max(map(len, bars)) <= 70 - len("^C"), "a bar with this after it would wrap, and could not be erased"


SLOW_LAYERS = """
import time
from moeoffload.expert_server.store import ExpertStore
acquire = ExpertStore.acquire
def acquire_slowly(*arguments):
    time.sleep(0.3)
    return acquire(*arguments)
ExpertStore.acquire = acquire_slowly
"""


def test_an_expert_server_shows_on_its_terminal_how_much_is_loaded_below_its_log_lines() -> None:
    words = ("--listen", "127.0.0.1:0", "--memory-gib", 1, *OPTIONS)
    with Terminal("moeoffload-expert", *words, columns=80, patch=SLOW_LAYERS) as terminal:
        address = terminal.until(" (cpu)\r\n").rpartition("ready on ")[2].split()[0]
        with ThreadPoolExecutor(1) as pool:  # while the terminal is read: its buffer holds some kilobytes
            host = pool.submit(lambda: open_model(DEMO, experts=[address], threads=1, device="cpu").close())
            terminal.until("lease ended")
            host.result()
        terminal.type(CTRL_C)
        code, _ = terminal.end()
    assert code == 0
    assert re.search(r"loading for .* [1-9][0-9]* of [0-9]+ MiB", terminal.shown)
    lines = [line.rpartition(BAR_GOES)[2] for line in terminal.shown.split("\r\n")]
    logged = [line for line in lines if " INFO moeoffload." in line]
    for step in ("GiB for experts", "lease opened", "loading 128 experts", "loaded in", "lease ended", "stopped"):
        assert [line for line in logged if step in line], step
    assert [line for line in logged if not re.match(r"(\^C)?[0-9]{4}-[0-9]{2}-", line)] == []
    assert terminal.shown.rstrip().endswith("stopped"), "no bar is left"


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_tokens_are_counted_on_the_terminal_while_the_answer_goes_to_a_file(
    server: RunningServer, tmp_path: Path, quiet: tuple[str, ...]
) -> None:
    out = tmp_path / "answer.txt"
    words = ("run", DEMO, "--prompt", TASKS[0], *options(server, *quiet))
    with Terminal("moeoffload", *words, stdout=out) as terminal:
        code, _ = terminal.end()
    assert (code, out.read_text()) == (0, f"{ANSWERS[0]}\n"), terminal.shown
    # Frames overwrite each other: what is shown last before the line of figures is the whole count.
    counts = re.findall(r"answer.* ([0-9]+) tokens", terminal.shown)
    assert counts[-1:] == ([] if quiet else ["4"])
    if not quiet:
        assert re.search(r"\x1b\[2K[^\n]*4 tokens · ", terminal.shown), "the count is erased before the figures"


def test_no_tokens_are_counted_between_the_words_of_an_answer(server: RunningServer) -> None:
    with Terminal("moeoffload", "run", DEMO, "--prompt", TASKS[0], *options(server)) as terminal:
        code, _ = terminal.end()
    assert code == 0
    assert f"{ANSWERS[0]}\r\n" in terminal.shown
    assert not re.search(r"answer.* [0-9]+ tokens", terminal.shown)


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
        (("--quiet", "--verbose", "--report", "/dev/null"), ""),
    ],
)
def test_an_answer_leaves_one_line_of_figures_unless_quiet(
    commands: Commands, server: RunningServer, options: tuple[str, ...], line: str
) -> None:
    arguments = ("--prompt", "add 17 25 =", *OPTIONS, "--experts", server.address)
    done = commands.run("moeoffload", "run", DEMO, *arguments, *options)
    assert done.code == 0, done.err
    assert re.fullmatch(line.format(re.escape(server.address)), done.err), done.err


TASKS = ("add 17 25 =", "reverse planet =", "sort kitchen =")
ANSWER_BEGINS = "\x1b[?25h"  # the bar that hid the cursor has gone
ANSWERS = (" 42", " tenalp", " cehiknt")


@pytest.fixture(scope="module")
def demo(server: RunningServer) -> Iterator[OffloadedModel]:
    with open_model(DEMO, experts=[server.address], threads=1, device="cpu", max_new_tokens=24) as offloaded:
        yield offloaded


def options(server: RunningServer, *more: object) -> list[str | Path]:
    common = ["--experts", server.address, "--threads", 1, "--device", "cpu"]
    return [str(word) for word in (*common, *more)]


def ask(conversation: Conversation, offloaded: OffloadedModel, text: str) -> tuple[str, int, int]:
    """The answer, the tokens computed before its first one, and those of the whole prompt."""
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    prompt = prepare_chat(offloaded, [*system, *conversation.turns, {"role": "user", "content": text}])
    offloaded.recorder.reset()
    out = io.StringIO()
    answer = conversation.ask(text, out)
    assert out.getvalue() == answer.text + "\n"
    return answer.text, offloaded.report().prompt_tokens, prompt.inputs["input_ids"].shape[1]


def test_a_turn_computes_only_what_is_new_and_answers_as_a_local_model_with_all_of_it(demo: OffloadedModel) -> None:
    conversation, n_before = Conversation(demo), 0
    for task in TASKS:
        text, n_computed, n_tokens = ask(conversation, demo, task)
        # The last token of an answer was chosen, and never fed.
        assert n_computed == n_tokens - n_before
        n_before = n_tokens + len(demo.tokenizer(text)["input_ids"])
    messages = conversation.turns[:-1]
    ids = prepare_chat(demo, messages).inputs["input_ids"]
    alone = local_model(DEMO).generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :]
    assert demo.tokenizer.decode(alone, skip_special_tokens=True) == conversation.turns[-1]["content"] == ANSWERS[-1]


def test_text_comes_with_each_token_and_not_with_each_word(demo: OffloadedModel) -> None:
    class Pieces(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return super().write(text)

    pieces: list[str] = []
    answer = Conversation(demo).ask("reverse planet =", Pieces())
    assert "".join(pieces) == answer.text + "\n"
    assert answer.text.strip() == "tenalp"
    assert len(pieces) > len("tenalp")


def test_what_changes_the_beginning_is_computed_again_and_clear_forgets(demo: OffloadedModel) -> None:
    conversation = Conversation(demo)
    ask(conversation, demo, TASKS[0])
    conversation.system = "Be brief."
    _, n_computed, n_tokens = ask(conversation, demo, TASKS[1])
    assert n_computed == n_tokens
    conversation.clear()
    assert not conversation.turns
    text, n_computed, n_tokens = ask(conversation, demo, TASKS[0])
    assert n_computed == n_tokens == len("Be brief.\n" + TASKS[0])
    assert text == ANSWERS[0]


def test_a_turn_that_is_stopped_or_refused_leaves_the_conversation_whole(demo: OffloadedModel) -> None:
    conversation, asked = Conversation(demo), 0

    def after_three_layers() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    ask(conversation, demo, TASKS[0])
    turns = list(conversation.turns)
    with pytest.raises(StoppedError):
        conversation.ask(TASKS[1], io.StringIO(), Watch(should_stop=after_three_layers))
    with pytest.raises(PromptError, match="context"):
        conversation.ask("x" * 9000, io.StringIO())
    assert conversation.turns == turns
    text, n_computed, n_tokens = ask(conversation, demo, TASKS[1])
    assert text == ANSWERS[1]
    assert n_computed < n_tokens, "keys and values of the first turn are still there"
    asked = -1
    answer = conversation.ask(TASKS[2], io.StringIO(), Watch(should_stop=after_three_layers))
    assert answer.ending is Ending.STOPPED
    assert conversation.turns[-1]["content"] == answer.text
    assert ask(conversation, demo, TASKS[0])[0] == ANSWERS[0]


def test_lines_of_a_pipe_are_turns(server: RunningServer, commands: Commands, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["chat", DEMO, *options(server, "--report", report)]
    lines = f'{TASKS[0]}\n\n"""\n{TASKS[1]}\n"""\n/clear\n/nothing\n{TASKS[2]}'
    done = commands.run("moeoffload", *words, stdin=lines)
    assert done.code == 0, done.err
    assert done.out == "".join(f"{answer}\n" for answer in ANSWERS)
    assert done.err.count("tokens/s") == 3
    assert "there is no /nothing" in done.err
    assert json.loads(report.read_text())["prompt_tokens"] == sum(map(len, TASKS)) + len("?\n")
    refused = commands.run("moeoffload", *words, "--quiet", stdin=b"\xff\n")
    assert refused.code == PromptError.exit_code
    assert refused.err.rstrip().endswith("error: the prompt is not valid UTF-8")


def test_the_end_of_a_pipe_ends_a_turn_of_several_lines(server: RunningServer, commands: Commands) -> None:
    done = commands.run("moeoffload", "chat", DEMO, *options(server), "--quiet", stdin=f'"""\n{TASKS[0]}\n')
    assert (done.code, done.out) == (0, f"{ANSWERS[0]}\n"), done.err


def test_a_model_without_a_chat_template_gets_plain_lines(
    server: RunningServer, commands: Commands, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(DEMO, plain, ignore=shutil.ignore_patterns("chat_template*"))
    done = commands.run("moeoffload", "chat", plain, *options(server), stdin=f"{TASKS[0]}\n{TASKS[1]}\n")
    assert (done.code, done.out) == (0, f"{ANSWERS[0]}\n{ANSWERS[1]}\n"), done.err
    assert "has no chat template" in done.err.splitlines()[0]


UNHEARD = """
import signal, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
"""
"""Has another thread take Ctrl-C: the main thread's wait goes on, as if it came just before that."""


def test_a_conversation_on_a_terminal(server: RunningServer) -> None:
    with Terminal("moeoffload", "chat", DEMO, *options(server), patch=UNHEARD) as terminal:
        terminal.until(">>> ")
        for task, answer in zip(TASKS[:2], ANSWERS[:2], strict=True):
            terminal.type(task + "\n")
            assert answer in terminal.until(">>> ")
        terminal.type("\x1b[A\x1b[A\n")  # the line before the last one
        assert ANSWERS[0] in terminal.until(">>> ")
        for line in ('"""\n', "sort\n"):  # one by one: Ctrl-C drops keys that were not read, and readline would wait
            terminal.type(line)
            terminal.until("... ")
        terminal.type(CTRL_C)
        assert "Ctrl-C again, Ctrl-D or /exit leaves" in terminal.until(">>> ")
        terminal.type("\x1b[200~reverse planet\n=\x1b[201~\n")
        assert terminal.until(">>> ").count("tokens/s") == 1, "lines that are pasted are one turn"
        terminal.type("/help\n")
        assert "/system TEXT" in terminal.until(">>> ")
        terminal.type(CTRL_C)
        terminal.until(">>> ")
        terminal.type(CTRL_C)
        code, _ = terminal.end()
    assert code == 0, terminal.shown
    assert "Traceback" not in terminal.shown


def test_ctrl_c_ends_an_answer_and_a_lost_server_does_not(
    server: RunningServer, start_server: object, tmp_path: Path
) -> None:
    endless = endless_model(tmp_path / "endless")
    lost = start_server()  # type: ignore[operator]
    with Terminal("moeoffload", "chat", endless, *options(lost, "--max-new-tokens", 100_000)) as terminal:
        terminal.until(">>> ")
        terminal.type("hello\n")
        terminal.until(ANSWER_BEGINS)
        lost.kill()
        terminal.until("its experts are computed by")
        terminal.type(CTRL_C)
        assert "tokens (stopped)" in terminal.until(">>> ")
        terminal.type("again\n")
        terminal.until(ANSWER_BEGINS)
        terminal.type(CTRL_C)
        rest = terminal.until(">>> ")
        terminal.type("/exit\n")
        code, _ = terminal.end()
    assert code == 0, terminal.shown
    assert "(stopped)" in rest
    assert "Traceback" not in terminal.shown
