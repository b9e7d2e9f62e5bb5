"""Two hosts on one server; the cable of one is pulled out and plugged in again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_kit.generation import DEMO
from fault_kit.network import Cable, NamespaceCable, ProxyCable, namespaces_allowed
from fault_kit.processes import wait_for
from fault_kit.second_host import SecondHost
from fault_kit.server import ServerProcess

from moeoffload.config import ExpertServerSettings, HostSettings
from moeoffload.control.client import ControlClient

NETWORK = "namespaces" if namespaces_allowed() else "loopback"
NOTICED_S = 20.0
LEASE_S = 30.0
"""A dead connection is given up after the keepalive's 10 s; a busy machine may take longer."""
BACK_S = 20.0
STEP_S = 10.0
QUICK_S, PATIENT_S = 0.5, 30.0
"""The least that the two hosts wait for a reply: a busy machine must not look like a lost server to the other one."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    host, options = "127.0.0.1", []
    if NETWORK == "namespaces":
        host, options = "0.0.0.0", ["--model", str(DEMO), *_insecure(ExpertServerSettings)]
    made = ServerProcess(tmp_path, *options, host=host)
    yield made
    made.close()


@pytest.fixture
def cables(server: ServerProcess) -> Iterator[list[Cable]]:
    kind = NamespaceCable if NETWORK == "namespaces" else ProxyCable
    made: list[Cable] = []
    try:
        for number in (1, 2):
            made.append(kind(server, number))
        yield made
    finally:
        for cable in made:
            cable.close()


@pytest.mark.parametrize("hosts_in", [NETWORK])
def test_a_host_cut_off_goes_on_alone_and_the_other_one_notices_nothing(
    server: ServerProcess, cables: list[Cable], tmp_path: Path, hosts_in: str
) -> None:
    options: dict[str, Any] = {"transport": "stream"}
    if _insecure(HostSettings) and NETWORK == "namespaces":
        options["insecure"] = True
    hosts: list[SecondHost] = []
    stats = ControlClient(f"127.0.0.1:{server.port}")
    try:
        for cable, floor_s in zip(cables, (QUICK_S, PATIENT_S), strict=True):
            options["dispatch_floor_s"] = floor_s
            hosts.append(SecondHost(tmp_path, DEMO, [cable.address], namespace=cable.namespace, **options))
        cut_off, other = hosts
        assert stats.stats(STEP_S).leases == 2
        resident = stats.stats(STEP_S).resident_bytes
        # On a busy machine the quick one may have given the server up for a moment already.
        wait_for(lambda: not _is_without(cut_off), "the server in use", BACK_S)
        lost = cut_off.progress().recovery["lost"]
        cables[0].unplug()
        wait_for(lambda: cut_off.progress().recovery["lost"] > lost, "the loss is noticed", NOTICED_S)
        before = cut_off.progress().n_generations, other.progress().n_generations
        wait_for(lambda: stats.stats(STEP_S).leases == 1, "the server gives up the host", LEASE_S)
        assert stats.stats(STEP_S).resident_bytes == resident, "the other host uses the same experts"
        assert cut_off.progress().n_generations > before[0]
        assert other.progress().n_generations > before[1]
        cables[0].plug()
        wait_for(lambda: not _is_without(cut_off), "the server in use again", BACK_S)
        told = [host.progress() for host in hosts]
        assert [each.results for each in told] == [[cut_off.tokens], [other.tokens]]
        assert cut_off.tokens == other.tokens
        assert told[1].recovery["events"] == []
    finally:
        stats.close()
        for host in hosts:
            host.kill()


def _is_without(host: SecondHost) -> bool:
    recovery = host.progress().recovery
    return bool(recovery["lost"] > recovery["returned"])


def _insecure(settings: type[ExpertServerSettings] | type[HostSettings]) -> list[str]:
    """Only what is in this machine is spoken to, and what is said means nothing."""
    return ["--insecure"] if "insecure" in settings.model_fields else []
