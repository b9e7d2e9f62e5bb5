"""Two hosts on one server, each at a cable of its own; one cable is pulled out and plugged in again."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_lines import wait_until
from conftest import DEMO, RunningServer, StartServer
from fault_kit.second_host import SecondHost
from virtual_cable import ip, virtual_cable

from moeoffload.control.client import ControlClient

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
