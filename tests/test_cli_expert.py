"""``moeoffload-expert`` as a process: its ready line, its streams, how it stops, and how it refuses."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_lines import STEP_TIMEOUT_S, Commands, one_line_error, shm_names, wait_until
from conftest import DEMO, READY_TIMEOUT_S, ROOT, RunningServer, StartServer, connected
from models import all_experts, reference_of
from server_processes import Process

from moeoffload.checkpoint import Checkpoint
from moeoffload.errors import ServerError
from moeoffload.host.session import open_model


@pytest.mark.parametrize(
    ("end", "warm"),
    [
        (lambda process: process.send_signal(signal.SIGTERM), False),
        (lambda process: process.send_signal(signal.SIGINT), True),
        (lambda process: process.stdin.close(), True),
    ],
    ids=["SIGTERM", "SIGINT", "the end of stdin"],
)
def test_what_stops_a_server_with_a_host_attached_leaves_nothing(
    start_server: StartServer, end: Callable[[Process], object], warm: bool
) -> None:
    server = start_server(warm=warm)
    with open_model(DEMO, experts=[server.address], threads=1):
        end(server.process)
        assert server.process.wait(READY_TIMEOUT_S) == 0
    printed = server.log.with_suffix(".out").read_text()
    assert printed == f"moeoffload-expert ready on {server.address} (cpu)\n", "stdout holds the ready line alone"
    assert "lease opened" in server.log_text, "logs go to stderr"
    assert server.log_text.rstrip().endswith("stopped")
    assert "Traceback" not in server.log_text
    assert not [name for name in shm_names() if f"moeoffload-{server.pid}-" in name]


@pytest.mark.parametrize(
    ("end", "options", "code", "said"),
    [
        (lambda process: process.send_signal(signal.SIGINT), [], 130, "interrupted"),
        (lambda process: process.send_signal(signal.SIGTERM), [], -signal.SIGTERM, "importing torch"),
        # As when Ctrl-C, or SIGKILL, ends the host that has started it.
        (lambda process: process.stdin.close(), ["--exit-with-stdin"], -signal.SIGINT, "importing torch"),
    ],
    ids=["SIGINT", "SIGTERM", "the end of stdin"],
)
def test_what_stops_a_server_while_it_imports_ends_it_before_it_is_ready(
    tmp_path: Path, end: Callable[[Process], object], options: list[str], code: int, said: str
) -> None:
    command = [sys.executable, "-m", "moeoffload.cli.expert_app", "--listen", "127.0.0.1:0", "--memory-gib", "1"]
    out, err = tmp_path / "out.txt", tmp_path / "err.txt"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            [*command, *options], stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, text=True, cwd=ROOT
        )
    try:
        wait_until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(), "the import of torch")
        end(process)
        assert process.wait(READY_TIMEOUT_S) == code
        assert out.read_text() == ""
        assert said in err.read_text().splitlines()[-1]
    finally:
        process.kill()
        process.communicate()


def test_version_is_one_line_on_stdout() -> None:
    """Of the console script as a user starts it."""
    script = Path(sys.executable).parent / "moeoffload-expert"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=STEP_TIMEOUT_S, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"moeoffload-expert [0-9]+\.[0-9]+\.[0-9]+\n", done.stdout)


def test_devices_and_memory_that_the_machine_does_not_have_are_refused(commands: Commands) -> None:
    have = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["no CUDA device"]
    for gpu, device in (("77", "cuda:77"), ("0,77", "cuda:")):
        line = one_line_error(commands.run("moeoffload-expert", "--gpu", gpu), 2)
        assert all(name in line for name in (f"device {device}", "no such GPU", *have))
    line = one_line_error(commands.run("moeoffload-expert", "--device", "cpu", "--memory-gib", "1e6"), 2)
    assert "memory-gib" in line
    assert "GiB" in line


def test_a_taken_address_is_refused_and_its_owner_goes_on(server: RunningServer, commands: Commands) -> None:
    arguments = ("--listen", server.address, "--device", "cpu", "--memory-gib", "1")
    result = commands.run("moeoffload-expert", *arguments)
    assert server.address in one_line_error(result, 2)
    with connected(server.address) as client:
        assert client.describe(STEP_TIMEOUT_S).device == "cpu"


def load_demo(address: str, reference: str) -> None:
    """Loads all experts of the demo model, which the host claims to know as ``reference``."""
    checkpoint = Checkpoint.open(DEMO)
    model, table = reference_of(checkpoint, reference), all_experts(checkpoint)
    with connected(address) as client, contextlib.closing(client.attach(STEP_TIMEOUT_S)) as lease:
        lease.load(model, table, progress=lambda loaded, total: None, timeout_s=STEP_TIMEOUT_S)


def test_a_server_reads_its_own_copy_of_the_model_if_it_has_one(
    server: RunningServer, start_server: StartServer, tmp_path: Path
) -> None:
    elsewhere = "/no/such/folder/here"
    load_demo(start_server("--model", shutil.copytree(DEMO, tmp_path / "copy")).address, elsewhere)
    with pytest.raises(ServerError, match=elsewhere):
        load_demo(server.address, elsewhere)


def test_the_port_of_the_stream_transport_can_be_chosen(start_server: StartServer, commands: Commands) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start_server("--stream-port", str(port), "--transport", "stream")
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    taken = commands.run("moeoffload-expert", "--listen", "127.0.0.1:0", "--stream-port", str(port))
    assert str(port) in one_line_error(taken, 2)
    assert server.process.poll() is None
