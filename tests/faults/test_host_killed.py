"""A host that is killed frees what it had on its servers: lease, experts, segments, descriptors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_kit.generation import DEMO
from fault_kit.leaks import Holding, settled, shm_left, shm_names
from fault_kit.second_host import SecondHost
from fault_kit.server import ServerProcess

from moeoffload.control.client import ControlClient

LEASE_S = 10.0
"""Longest time until a server gives up a host whose machine is gone; a dead process shows at once."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    made = ServerProcess(tmp_path_factory.mktemp("server"))
    yield made
    made.close()


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_what_a_killed_host_had_is_freed(server: ServerProcess, tmp_path: Path, transport: str) -> None:
    names = shm_names()
    client = ControlClient(server.address)
    client.connect(LEASE_S)
    try:
        SecondHost(tmp_path, DEMO, [server.address], transport=transport).kill()  # what is made once is there now
        assert settled(lambda: _left(client), LEASE_S) == []
        alone = Holding.of(server.pid)
        host = SecondHost(tmp_path, DEMO, [server.address], transport=transport)
        stats = client.stats(LEASE_S)
        assert (stats.leases, stats.resident_bytes > 0) == (1, True)
        host.kill()
        assert settled(lambda: _left(client) + Holding.of(server.pid).beyond(alone), LEASE_S) == []
        assert shm_left(names, server.pid) == []
        again = SecondHost(tmp_path, DEMO, [server.address], transport=transport)
        again.kill()
        assert again.tokens == host.tokens, "the server serves the next host as the one before"
    finally:
        client.close()


def _left(client: ControlClient) -> list[str]:
    stats = client.stats(LEASE_S)
    return [f"{stats.leases} leases", f"{stats.resident_bytes} bytes"] if stats.leases or stats.resident_bytes else []
