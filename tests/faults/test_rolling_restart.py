"""All servers restarted one after the other under one generation. Longer: bench/rolling_restart.py."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tasks
from fault_kit.generation import DEMO
from fault_kit.rolling import rolling_restart
from fault_kit.server import ServerProcess

from moeoffload.host.session import open_model

N_SERVERS = 2
N_TOKENS = 120
TOKEN_S = 0.03
"""So that the generation lasts longer than the restarts."""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    with ThreadPoolExecutor(N_SERVERS) as pool:
        made = list(pool.map(lambda _: ServerProcess(tmp_path), range(N_SERVERS)))
    yield made
    for server in made:
        server.close()


def test_a_rolling_restart_changes_no_token(servers: list[ServerProcess]) -> None:
    addresses = [server.address for server in servers]
    with open_model(DEMO, experts=addresses, threads=1, device="cpu", model_dtype="f32") as offloaded:
        result = rolling_restart(offloaded, servers, tasks.prompts(1, seed=5)[0], N_TOKENS, TOKEN_S)
    assert result.equal_tokens == result.tokens == N_TOKENS
    assert [restart.exit_code for restart in result.restarts] == [0] * N_SERVERS
