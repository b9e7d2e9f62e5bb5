"""``moeoffload run`` as a process: its streams, its prompts, its report, and what it leaves however it ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from command_lines import (
    CLEAN_TIMEOUT_S,
    ROOT,
    STEP_TIMEOUT_S,
    Command,
    Commands,
    one_line_error,
    run_python,
    wait_until,
)  # fmt: skip
from conftest import DEMO, RunningServer, StartServer, stats, wait_until_left
from models import endless_model, next_logits

from moeoffload.errors import SettingError, SystemLimitError
from moeoffload.host.session import open_model
from moeoffload.native import has_gpu_driver

PROMPT, OTHER = "add 17 25 =", "reverse planet ="
ANSWERS = {PROMPT: " 42", OTHER: " tenalp"}
N_TOKENS = 8
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_model(tmp_path_factory.mktemp("endless"))


def wait_until_free(address: str) -> None:
    """The server has no lease any more, nor experts of one."""
    wait_until_left(address)
    wait_until(lambda: stats(address).resident_bytes == 0, "the release of the experts", CLEAN_TIMEOUT_S)


def wait_for_requests(address: str, command: Command) -> None:
    """The host ``command`` is in the middle of its answer."""
    begun = stats(address).requests

    def generating() -> bool:
        assert not command.ended, command.err.read_text()
        return stats(address).requests > begun + 20

    wait_until(generating, "requests of the host")


def run_options(*addresses: str) -> list[str]:
    options = ["--threads", "1", "--device", "cpu", "--max-new-tokens", str(N_TOKENS)]
    return [*options, "--experts", ",".join(addresses)] if addresses else [*options, "--server-memory-gib", "1"]


def exit_code(number: signal.Signals) -> int:
    """Of a command that a signal ends; nothing unwinds at SIGKILL."""
    return -number if number == signal.SIGKILL else 128 + number


def check_interrupted(result_err: str) -> None:
    assert "Traceback" not in result_err
    assert "Error" not in result_err
    assert "Exception ignored" not in result_err


def test_a_run_starts_its_own_server_and_writes_the_text_alone_to_stdout(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where every Python process first prints something else, as an administrator may have it do."""
    (tmp_path / "sitecustomize.py").write_text("print('welcome', flush=True)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    report = tmp_path / "report.json"
    command = commands.start(
        "moeoffload", "run", DEMO, "--prompt", PROMPT, "--report", report, *run_options(), warm=False
    )
    wait_until(lambda: command.servers() or command.ended, "a spawned server")
    pids = [process.pid for process in command.servers()]
    result = command.wait()
    assert result.code == 0, result.err
    assert result.out == f"welcome\n{ANSWERS[PROMPT]}\n"
    assert "prefill" in result.err, "the table goes to stderr"
    assert pids
    commands.check_clean(*pids)
    data = json.loads(report.read_text())
    (server,) = data["servers"]
    assert server["transport"] == "shared"
    assert server["n_experts"] == data["model"]["routed_experts"]
    assert server["resident_bytes"] == data["model"]["expert_bytes"]
    assert data["phases"]["prefill"]["tokens"] == data["prompt_tokens"]


HEAR_SERVER = """
import sys
def hear(event, arguments):
    if event == "subprocess.Popen" and "moeoffload.cli.expert_app" in arguments[1]:
        print("torch" in sys.modules, "transformers" in sys.modules, flush=True)
sys.addaudithook(hear)
from moeoffload.cli.entry import moeoffload
moeoffload()
"""


@pytest.mark.skipif(has_gpu_driver(), reason="torch is asked for the GPUs first")
def test_a_server_starts_before_the_host_imports_torch_if_one_is_needed_in_any_case() -> None:
    for options, imported in (((), "False False"), (("--local-experts-gib", "0.001"), "True True")):
        arguments = ["run", str(DEMO), "--prompt", PROMPT, *run_options(), *options]
        done = run_python(HEAR_SERVER, *arguments)
        assert (done.code, done.out) == (0, f"{imported}\n{ANSWERS[PROMPT]}\n"), done.err


def test_what_the_settings_alone_make_wrong_is_told_before_a_server_starts(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("none")
    done = run_python(HEAR_SERVER, "run", str(DEMO), "--prompt", PROMPT, "--tls-ca", str(tmp_path / "ca.pem"))
    assert "ca.pem" in one_line_error(done, SettingError.exit_code)


def test_a_spawned_server_that_refuses_its_settings_is_one_clear_line(commands: Commands, tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "expert-server-0.log").mkdir(parents=True)
    for options, code, reason in (
        (["--server-memory-gib", "10000"], SettingError.exit_code, "memory-gib: 10000 is more than cpu has"),
        (["--work-dir", str(work)], SystemLimitError.exit_code, "expert-server-0.log"),
    ):
        result = commands.run("moeoffload", "run", DEMO, "--prompt", PROMPT, *run_options(), *options, warm=False)
        assert reason in one_line_error(result, code)


def test_prompts_come_from_options_a_file_and_stdin_in_that_order(
    commands: Commands, server: RunningServer, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(OTHER + "\n")  # as editors end files; the tokens are those of the prompt alone
    options = ["--prompt", PROMPT, "--prompt", "-", "--prompt-file", str(file), *run_options(server.address)]
    result = commands.run("moeoffload", "run", DEMO, *options, stdin=OTHER)
    assert result.code == 0, result.err
    assert result.out == f"{ANSWERS[PROMPT]}\n{ANSWERS[OTHER]}\n{ANSWERS[OTHER]}\n"
    assert result.err.count(f"> {OTHER}") == 2
    weights = DEMO / "model.safetensors"
    result = commands.run(
        "moeoffload", "run", weights, "--prompt-file", "-", *run_options(server.address), stdin=PROMPT
    )
    assert (result.code, result.out) == (0, ANSWERS[PROMPT] + "\n"), result.err
    wait_until_free(server.address)


def test_a_reader_of_stdout_that_goes_away_ends_the_run_quietly(
    commands: Commands, server: RunningServer, endless: Path, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Open for reading before the child opens it for writing, gone as soon as it has.
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        command = commands.start(
            "moeoffload", "run", endless, "--prompt", PROMPT, *run_options(server.address), stdout=pipe
        )
        wait_until(lambda: command.err.exists(), "the start of the command")
    finally:
        os.close(reader)
    result = command.wait()
    assert result.code == 141, result.err
    check_interrupted(result.err)
    commands.check_clean()
    wait_until_free(server.address)


def test_a_server_that_is_not_required_and_not_there_is_replaced_by_a_spawned_one(
    commands: Commands, server: RunningServer, unused_address: str
) -> None:
    arguments = ["--prompt", PROMPT, *run_options(unused_address, server.address), "--server-memory-gib", "1"]
    result = commands.run("moeoffload", "run", DEMO, *arguments, "--connect-timeout-s", "5", "--no-required")
    assert (result.code, result.out) == (0, ANSWERS[PROMPT] + "\n"), result.err
    warnings = [line for line in result.err.splitlines() if line.startswith("WARNING moeoffload.host.fleet")]
    assert len(warnings) == 1, result.err
    assert unused_address in warnings[0]
    wait_until_free(server.address)


IMPORTS = (("_pydantic_core", signal.SIGINT), ("libtorch_cpu", signal.SIGINT), ("libtorch_cpu", signal.SIGTERM))


def test_a_signal_while_the_host_imports_ends_it_at_once(commands: Commands) -> None:
    arguments = ["run", str(DEMO), "--prompt", PROMPT, *run_options()]
    for library, number in IMPORTS:
        command = commands.start("moeoffload", *arguments, warm=False)
        maps = Path(f"/proc/{command.pid}/maps")
        wait_until(lambda: library in maps.read_text(), f"the import of {library}")
        result = command.send(number).wait()
        # The shell says what ended a process by SIGTERM; there is nothing yet that has to be undone.
        said = (130, "interrupted\n") if number == signal.SIGINT else (-number, "")
        assert (result.code, result.err, result.out) == (*said, "")
    commands.check_clean()


def test_a_signal_while_its_server_starts_ends_both(commands: Commands) -> None:
    arguments = ["run", str(DEMO), "--prompt", PROMPT, *run_options()]
    running = {number: commands.start("moeoffload", *arguments) for number in SIGNALS}
    for number, command in running.items():
        wait_until(command.servers, "a spawned server")
        command.send(number)
    for number, command in running.items():
        result = command.wait()
        # The server starts before the host's imports, in which SIGTERM ends the host as it ends any process.
        assert result.code in (128 + number, -signal.SIGTERM)
        assert result.out == ""
        assert result.err == ("interrupted\n" if number == signal.SIGINT else "")
    commands.check_clean()


GATE = """
import pathlib, time
from moeoffload.expert_server.store import ExpertStore
acquire = ExpertStore.acquire
def acquire_behind_gate(*arguments):
    while not pathlib.Path({gate!r}).exists():
        time.sleep(0.02)
    return acquire(*arguments)
ExpertStore.acquire = acquire_behind_gate
"""


def test_a_signal_while_the_server_loads_ends_the_host_and_frees_the_server(
    commands: Commands, start_server: StartServer, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    server = start_server(patch=GATE.format(gate=str(gate)))
    for n_before, number in enumerate(SIGNALS):
        command = commands.start("moeoffload", "run", DEMO, "--prompt", PROMPT, *run_options(server.address))
        wait_until(lambda: server.log_text.count("loading 128 experts") > n_before, "the server to load")
        result = command.send(number).wait()
        assert (result.code, result.out) == (128 + number, ""), result.err
        check_interrupted(result.err)
        wait_until_left(server.address)
    gate.touch()
    wait_until_free(server.address)
    with open_model(DEMO, experts=[server.address], threads=1) as model:
        next_logits(model)
    commands.check_clean(server.process.pid)


SIGNAL_IN_DEL = """
import os
from moeoffload.host import session

class Dying:
    def __del__(self):
        os.kill(os.getpid(), {number})
        while True:
            pass  # until the handler runs; Python drops what it raises here

def load(*arguments, then=session.load_with_packed_linears):
    Dying()
    return then(*arguments)

session.load_with_packed_linears = load
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_not_lost_where_python_drops_exceptions(
    commands: Commands, start_server: StartServer, tmp_path: Path, number: signal.Signals
) -> None:
    server = start_server(patch=GATE.format(gate=str(tmp_path / "gate")))
    patch = SIGNAL_IN_DEL.format(number=int(number))
    arguments = ["run", str(DEMO), "--prompt", PROMPT, *run_options(server.address)]
    result = commands.start("moeoffload", *arguments, patch=patch).wait()
    assert (result.code, result.out) == (128 + number, ""), result.err
    check_interrupted(result.err)
    (tmp_path / "gate").touch()
    wait_until_free(server.address)
    commands.check_clean(server.process.pid)


@pytest.mark.parametrize(("number", "warm"), [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGKILL, True)])
def test_a_signal_while_the_host_generates_ends_it_and_leaves_the_server_to_others(
    commands: Commands, server: RunningServer, endless: Path, number: signal.Signals, warm: bool
) -> None:
    with open_model(DEMO, experts=[server.address], threads=1) as other:
        before = next_logits(other)
        options = [*run_options(server.address), "--max-new-tokens", "100000"]
        command = commands.start("moeoffload", "run", endless, "--prompt", PROMPT, *options, warm=warm)
        wait_for_requests(server.address, command)
        result = command.send(number).wait()
        assert result.code == exit_code(number), result.err
        check_interrupted(result.err)
        wait_until(lambda: stats(server.address).leases == 1, "the end of the lease", CLEAN_TIMEOUT_S)
        assert torch.equal(next_logits(other), before)
    wait_until_free(server.address)
    commands.check_clean(server.process.pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_spawned_server_goes_with_its_host_whatever_ends_that(
    commands: Commands, endless: Path, tmp_path: Path, number: signal.Signals
) -> None:
    options = [*run_options(), "--max-new-tokens", "100000", "--work-dir", str(tmp_path / "work")]
    command = commands.start("moeoffload", "run", endless, "--prompt", PROMPT, *options)
    log = tmp_path / "work" / "expert-server-0.log"
    wait_until(lambda: log.exists() and "attached over shared" in log.read_text(), "the host to attach")
    pids = [process.pid for process in command.servers()]
    result = command.send(number).wait()
    assert result.code == exit_code(number)
    check_interrupted(result.err)
    commands.check_clean(*pids)
    assert log.read_text().rstrip().endswith("stopped"), "the server has stopped in order"


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "connection lost"), (signal.SIGTERM, "stopping"), (signal.SIGSTOP, "2 s")]
)
def test_a_required_server_that_fails_while_the_host_generates_is_one_clear_line(
    commands: Commands, start_server: StartServer, endless: Path, number: signal.Signals, reason: str
) -> None:
    server = start_server("--drain-timeout-s", "1")
    options = [*run_options(server.address), "--max-new-tokens", "100000", "--dispatch-timeout-s", "2", "--required"]
    command = commands.start("moeoffload", "run", endless, "--prompt", PROMPT, *options)
    wait_for_requests(server.address, command)
    server.process.send_signal(number)
    try:
        result = command.wait(STEP_TIMEOUT_S)
    finally:
        if number == signal.SIGSTOP:
            server.process.send_signal(signal.SIGCONT)
    assert result.code == 5, result.err
    assert "Traceback" not in result.err
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert [result.err.rstrip().splitlines()[-1]] == errors, "one line after the run's table"
    assert server.address in errors[0]
    assert reason in errors[0]
    if number == signal.SIGSTOP:
        wait_until_free(server.address)
    commands.check_clean(server.process.pid)
