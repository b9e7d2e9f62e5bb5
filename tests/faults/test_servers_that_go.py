"""Servers that are told to end: their hosts go on, and they end in time with code 0."""

from __future__ import annotations

import ctypes
import os
import signal

import tasks
from command_lines import Commands, wait_until
from conftest import DEMO, StartServer
from fault_kit.generation import fixed_prompts
from fault_kit.rolling import rolling_restart

from moeoffload.host.session import open_model

GRACE_S = 20.0


def test_a_rolling_restart_changes_no_token(start_server: StartServer) -> None:
    """All servers restarted one after the other under one generation. Longer: bench/rolling_restart.py."""
    servers = [start_server() for _ in range(2)]
    addresses = [server.address for server in servers]
    with open_model(DEMO, experts=addresses, threads=1, device="cpu", model_dtype="f32") as offloaded:
        # Tokens take so long that the generation lasts longer than the restarts.
        result = rolling_restart(offloaded, servers, tasks.prompts(1, seed=5)[0], n_tokens=120, token_s=0.03)
        recovery = offloaded.report().to_json()["recovery"]
    assert result.equal_tokens == result.tokens == 120
    assert (recovery["drained"], recovery["lost"], recovery["returned"]) == (2, 0, 2)
    assert [restart.exit_code for restart in result.restarts] == [0, 0]


def test_a_signal_that_another_thread_takes_ends_a_server_that_nobody_uses(start_server: StartServer) -> None:
    """As happens when a thread that held signals back takes one that the main thread was to be woken by."""
    server = start_server()
    threads = [int(name) for name in os.listdir(f"/proc/{server.pid}/task") if int(name) != server.pid]
    assert ctypes.CDLL(None, use_errno=True).tgkill(server.pid, threads[-1], signal.SIGTERM) == 0
    assert server.process.wait(GRACE_S) == 0


def test_a_second_signal_ends_a_server_that_waits_for_its_hosts(start_server: StartServer, commands: Commands) -> None:
    server = start_server()
    options = ["--device", "cpu", "--threads", "1", "--experts", server.address, "--required"]
    prompts = [word for text in fixed_prompts()[:4] for word in ("--prompt", text)]
    command = commands.start("moeoffload", "run", DEMO, *options, *prompts * 100)
    wait_until(lambda: command.out.exists() and len(command.out.read_text().splitlines()) > 3, "the first answers")
    server.process.terminate()
    wait_until(lambda: "draining: 1 leases" in server.log_text, "the first signal to be heard")
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(GRACE_S) == 0
    result = command.wait()
    assert result.code == 5, result.err
    assert server.address in result.err.strip().splitlines()[-1]
