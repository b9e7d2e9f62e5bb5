"""Servers that are told to end, hosts cut off, connections whose closing is interrupted: what stays goes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tasks
from command_lines import Commands, run_python, wait_until
from conftest import DEMO, RunningServer, StartServer
from fault_kit.generation import fixed_prompts
from fault_kit.rolling import rolling_restart
from fault_kit.second_host import SecondHost
from virtual_cable import ip, virtual_cable

from moeoffload.control.client import ControlClient, HostCredentials
from moeoffload.control.probe import why_not
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


STEP_S = 20.0
LEASE_S = 30.0
"""A dead connection is given up after the keepalive's 10 s; a busy machine may take longer."""

Cut = Callable[[str], None]


@contextlib.contextmanager
def host_at_a_cable(
    folder: Path, server: RunningServer, number: int, floor_s: float
) -> Iterator[tuple[SecondHost, Cut]]:
    """A host in a network namespace of its own, behind a virtual card that is set to ``down`` and ``up``.

    The test is skipped where this user may not make them.
    """
    pid = os.getpid()  # two runs of this at the same time must not meet
    name, card = f"moeoffload-{pid}-{number}", f"moe{pid % 100000}-{number}"
    near, far = (f"10.{100 + pid % 100}.{pid // 100 % 250}.{4 * number + last}" for last in (1, 2))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(virtual_cable(name, card, near, far))
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        address = f"{near}:{server.address.rpartition(':')[2]}"
        host = SecondHost(
            folder, [address], namespace=name, transport="stream", dispatch_floor_s=floor_s, insecure=True
        )
        stack.callback(host.close)
        yield host, lambda state: ip("link", "set", card, state)


def test_a_host_cut_off_goes_on_alone_and_the_other_one_notices_nothing(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server("--listen", "0.0.0.0:0", "--insecure", "--model", str(DEMO))

    def is_without(host: SecondHost) -> bool:
        recovery = host.progress().recovery
        return bool(recovery["lost"] > recovery["returned"])

    with (
        contextlib.closing(ControlClient(server.address)) as client,
        # The second one is patient: a busy machine must not look like a lost server to it.
        host_at_a_cable(tmp_path, server, 1, floor_s=0.5) as (cut_off, cable),
        host_at_a_cable(tmp_path, server, 2, floor_s=30.0) as (other, _),
    ):
        resident = client.stats(STEP_S).resident_bytes
        assert client.stats(STEP_S).leases == 2
        # On a busy machine the quick one may have given the server up for a moment already.
        wait_until(lambda: not is_without(cut_off), "the server in use", STEP_S)
        lost = cut_off.progress().recovery["lost"]
        cable("down")
        wait_until(lambda: cut_off.progress().recovery["lost"] > lost, "the loss is noticed", STEP_S)
        before = [host.progress().n_generations for host in (cut_off, other)]
        wait_until(lambda: client.stats(STEP_S).leases == 1, "the server gives up the host", LEASE_S)
        assert client.stats(STEP_S).resident_bytes == resident, "the other host uses the same experts"
        assert all(host.progress().n_generations > n for host, n in zip((cut_off, other), before, strict=True))
        cable("up")
        wait_until(lambda: not is_without(cut_off), "the server in use again", STEP_S)
        assert cut_off.progress().results == other.progress().results == [other.tokens]
        assert other.progress().recovery["events"] == []


STUCK = """
import threading
from moeoffload.control import client

class Stuck(client.HostCredentials):
    def channel(self, address, options):
        channel = super().channel(address, options)
        channel.close = threading.Event().wait
        return channel

client.CLOSE_S = 0.1
client.ControlClient("127.0.0.1:1", Stuck()).close()
print("ended", flush=True)
"""


def test_a_close_that_never_ends_does_not_keep_the_interpreter() -> None:
    done = run_python(STUCK)
    assert (done.code, done.out) == (0, "ended\n"), done.err


def test_a_name_that_is_not_resolved_in_time_is_not_waited_for(unresolved: list[bool]) -> None:
    assert why_not("a-name:50051", HostCredentials(), 0.1) is None
    assert unresolved == [], "it was not waited for"
