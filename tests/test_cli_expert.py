"""``moeoffload-expert`` as a process: its ready line, its streams, how it stops, and how it refuses."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from command_lines import STEP_TIMEOUT_S, Commands, one_line_error, shm_names, wait_until
from conftest import DEMO, READY_TIMEOUT_S, ROOT, RunningServer, StartServer, connected

from moeoffload.checkpoint import Checkpoint
from moeoffload.control.protocol import dtype_label
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.errors import ServerError
from moeoffload.host.session import open_model
from moeoffload.placement import ExpertTable


@contextlib.contextmanager
def started_by_user(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The console script as a user starts it; yields the process and its stderr."""
    log = folder / "stderr.txt"
    script = Path(sys.executable).parent / "moeoffload-expert"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [script, "--listen", "127.0.0.1:0", "--device", "cpu", "--threads", "1", "--memory-gib", "1", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
        )
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def address_of(ready_line: str) -> str:
    match = re.fullmatch(r"moeoffload-expert ready on (127\.0\.0\.1:[1-9][0-9]*) \(cpu\)\n", ready_line)
    assert match is not None, ready_line
    return match[1]


def names_of(pid: int) -> set[str]:
    return {name for name in shm_names() if f"moeoffload-{pid}-" in name}


@pytest.mark.parametrize(
    ("end", "options"),
    [
        (lambda process: process.send_signal(signal.SIGTERM), []),
        (lambda process: process.send_signal(signal.SIGINT), []),
        (lambda process: process.stdin.close(), ["--exit-with-stdin"]),
    ],
    ids=["SIGTERM", "SIGINT", "the end of stdin"],
)
def test_what_stops_a_server_with_a_host_attached_leaves_nothing(
    tmp_path: Path, end: Callable[[subprocess.Popen[str]], object], options: list[str]
) -> None:
    with started_by_user(tmp_path, *options) as (process, log):
        assert process.stdout is not None
        with open_model(DEMO, experts=[address_of(process.stdout.readline())], threads=1):
            end(process)
            assert process.wait(READY_TIMEOUT_S) == 0
        assert process.stdout.read() == "", "stdout holds the ready line alone"
        text = log.read_text()
        assert "lease opened" in text, "logs go to stderr"
        assert text.rstrip().endswith("stopped")
        assert "Traceback" not in text
        assert not names_of(process.pid)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_while_it_imports_ends_it_before_it_is_ready(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with (tmp_path / "stderr.txt").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "moeoffload.cli.expert_app", "--listen", "127.0.0.1:0", "--memory-gib", "1"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=ROOT,
        )
    try:
        wait_until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(), "the import of torch")
        process.send_signal(number)
        assert process.communicate(timeout=READY_TIMEOUT_S)[0] == b""
        assert process.returncode == code
        *_, last = (tmp_path / "stderr.txt").read_text().splitlines()
        assert last == "interrupted" if code == 130 else "importing torch" in last
    finally:
        process.kill()
        process.communicate()


def test_version_is_one_line_on_stdout(commands: Commands) -> None:
    result = commands.run("moeoffload-expert", "--version", warm=False)
    assert (result.code, result.err) == (0, "")
    assert re.fullmatch(r"moeoffload-expert [0-9]+\.[0-9]+\.[0-9]+\n", result.out)


def test_devices_and_memory_that_the_machine_does_not_have_are_refused(commands: Commands) -> None:
    line = one_line_error(commands.run("moeoffload-expert", "--gpu", "77"), 2)
    have = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["no CUDA device"]
    assert all(name in line for name in ("cuda:77", *have))
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
    table = ExpertTable(tuple(tuple(range(layer.n_experts)) for layer in checkpoint.layers))
    model = pb.ModelReference(
        reference=reference, digest=checkpoint.digest, compute_dtype=dtype_label(checkpoint.dtype)
    )
    with connected(address) as client:
        lease = client.attach(STEP_TIMEOUT_S)
        try:
            lease.load(model, table, progress=lambda loaded, total: None, timeout_s=STEP_TIMEOUT_S)
        finally:
            lease.close()


def test_a_server_reads_its_own_copy_of_the_model_if_it_has_one(
    server: RunningServer, start_server: StartServer, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in DEMO.iterdir():
        os.link(file, copy / file.name)
    elsewhere = "/no/such/folder/here"
    load_demo(start_server("--model", str(copy)).address, elsewhere)
    with pytest.raises(ServerError, match=elsewhere):
        load_demo(server.address, elsewhere)


def test_the_port_of_the_stream_transport_can_be_chosen(start_server: StartServer) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start_server("--stream-port", str(port), "--transport", "stream")
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    taken = subprocess.run(
        [sys.executable, "-m", "moeoffload.cli.expert_app", "--listen", "127.0.0.1:0", "--stream-port", str(port)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert taken.returncode == 2
    assert str(port) in taken.stderr
    assert "Traceback" not in taken.stderr
    assert server.process.poll() is None
