"""Two hosts on one server; the cable of one is pulled out and plugged in again."""

from __future__ import annotations

import contextlib
from pathlib import Path

from fault_kit.generation import DEMO
from fault_kit.processes import wait_for
from fault_kit.proxy import Proxy
from fault_kit.second_host import SecondHost
from fault_kit.server import ServerProcess

from moeoffload.control.client import ControlClient

NOTICED_S = 20.0
LEASE_S = 30.0
"""A dead connection is given up after the keepalive's 10 s; a busy machine may take longer."""
BACK_S = 20.0
STEP_S = 10.0
QUICK_S, PATIENT_S = 0.5, 30.0
"""The least that the two hosts wait for a reply: a busy machine must not look like a lost server to the other one."""


def test_a_host_cut_off_goes_on_alone_and_the_other_one_notices_nothing(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        server = ServerProcess(tmp_path)
        stack.callback(server.close)
        stats = ControlClient(server.address)
        stack.callback(stats.close)
        cables: list[Proxy] = []
        hosts: list[SecondHost] = []
        for number, floor_s in enumerate((QUICK_S, PATIENT_S)):
            cable = Proxy(f"127.0.0.{10 + number}", server.host)
            stack.callback(cable.close)
            cable.forward(server.ports())
            address = f"{cable.here}:{server.port}"
            host = SecondHost(tmp_path, DEMO, [address], transport="stream", dispatch_floor_s=floor_s)
            stack.callback(host.kill)
            cables.append(cable)
            hosts.append(host)
        cut_off, other = hosts
        assert stats.stats(STEP_S).leases == 2
        resident = stats.stats(STEP_S).resident_bytes
        # On a busy machine the quick one may have given the server up for a moment already.
        wait_for(lambda: not _is_without(cut_off), "the server in use", BACK_S)
        lost = cut_off.progress().recovery["lost"]
        cables[0].stall()  # nothing passes any more, and nobody is told
        wait_for(lambda: cut_off.progress().recovery["lost"] > lost, "the loss is noticed", NOTICED_S)
        before = cut_off.progress().n_generations, other.progress().n_generations
        wait_for(lambda: stats.stats(STEP_S).leases == 1, "the server gives up the host", LEASE_S)
        assert stats.stats(STEP_S).resident_bytes == resident, "the other host uses the same experts"
        assert cut_off.progress().n_generations > before[0]
        assert other.progress().n_generations > before[1]
        cables[0].mend()
        wait_for(lambda: not _is_without(cut_off), "the server in use again", BACK_S)
        told = [host.progress() for host in hosts]
        assert [each.results for each in told] == [[cut_off.tokens], [other.tokens]]
        assert cut_off.tokens == other.tokens
        assert told[1].recovery["events"] == []


def _is_without(host: SecondHost) -> bool:
    recovery = host.progress().recovery
    return bool(recovery["lost"] > recovery["returned"])
