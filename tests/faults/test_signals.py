"""Signals to an expert server: it lets its hosts move on and ends, or ends at once, with code 0."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_lines import Commands, wait_until
from conftest import DEMO
from fault_kit.generation import fixed_prompts
from fault_kit.server import ServerProcess

GRACE_S = 20.0
N_PROMPTS = 400


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    made = ServerProcess(tmp_path)
    yield made
    made.close()


def test_a_signal_ends_a_server_that_nobody_uses_at_once(server: ServerProcess) -> None:
    assert server.drain(GRACE_S) == 0


def test_a_signal_that_another_thread_takes_ends_a_server(server: ServerProcess) -> None:
    """As happens when a thread that held signals back takes one that the main thread was to be woken by."""
    threads = [int(name) for name in os.listdir(f"/proc/{server.pid}/task") if int(name) != server.pid]
    assert ctypes.CDLL(None, use_errno=True).tgkill(server.pid, threads[-1], signal.SIGTERM) == 0
    assert server.reap(GRACE_S) == 0


def test_a_second_signal_ends_a_server_that_waits_for_its_hosts(server: ServerProcess, commands: Commands) -> None:
    options = ["--device", "cpu", "--threads", "1", "--experts", server.address, "--required"]
    prompts = [word for text in fixed_prompts()[:4] for word in ("--prompt", text)]
    command = commands.start("moeoffload", "run", DEMO, *options, *prompts * (N_PROMPTS // 4))
    wait_until(lambda: command.out.exists() and len(command.out.read_text().splitlines()) > 3, "the first answers")
    server.tell(signal.SIGTERM)
    wait_until(lambda: "draining: 1 leases" in server.log_text, "the first signal to be heard")
    server.tell(signal.SIGINT)
    assert server.reap(GRACE_S) == 0
    result = command.wait()
    assert result.code == 5, result.err
    assert server.address in result.err.strip().splitlines()[-1]
