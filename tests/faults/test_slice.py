"""A fault of every kind, drawn from a seed, over generation: same tokens, in time, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fault_kit.kinds import KINDS
from fault_kit.schedule import SETUPS, Fault, Setup, draw_faults
from fault_kit.world import World
from server_processes import DEMO

FAULTS = draw_faults(len(KINDS), seed=20)
N_TWICE = 5


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world")) as made:
        yield made


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_faults_cost_a_moment_and_no_token(world: World, setup: Setup) -> None:
    world.open(setup)
    try:
        outcomes = [world.run(fault) for fault in FAULTS if fault.setup == setup]
    finally:
        left = world.shut()
    assert outcomes
    assert [outcome for outcome in outcomes if not outcome.ok] == []
    assert left == []
    noticed = {kind.name for kind in KINDS if kind.loses}
    unnoticed = [outcome for outcome in outcomes if outcome.kind in noticed and not outcome.lost]
    assert not unnoticed, "a fault that the host did not notice tests nothing"
    rescued = "replica_calls" if setup.rescue == "replica" else "fallback_calls"
    assert [outcome for outcome in outcomes if outcome.lost and not getattr(outcome, rescued)] == []
    # One line when a server is lost and one when it is back, for every part of the experts that changed hands.
    assert [outcome for outcome in outcomes if outcome.warnings > outcome.lost + outcome.returned] == []


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_duplicates_are_dropped_and_counted(world: World, transport: str) -> None:
    # Patient: on a busy machine a server may look lost for a moment.
    world.open(Setup(transport, "fallback"), dispatch_floor_s=20.0, dispatch_timeout_s=20.0)
    try:
        before = world.recovery()
        world.stations[0].server.spoil("twice", N_TWICE)
        assert world.generate() == world.expected
        assert world.generate() == world.expected
        after = world.recovery()
        # A server that was not given a core in time finds the next request there, and does not reply twice.
        assert 0 < after["stale"] - before["stale"] <= N_TWICE
        assert after["lost"] == before["lost"]
    finally:
        assert world.shut() == []


def test_an_encrypted_stream_notices_every_bit(tmp_path: Path) -> None:
    (corrupted,) = (kind for kind in KINDS if kind.name == "frame corrupted on the link")
    setup = Setup("stream", "fallback")
    # With these options a server on loopback encrypts, too.
    with World(tmp_path, "--insecure", "--model-root", str(DEMO)) as world:
        world.open(setup)
        outcome = world.run(Fault(0, setup, replace(corrupted, loses=True), 1, 0.3, 0.0, before_frames=True))
        assert outcome.ok, outcome
        assert outcome.lost == outcome.returned == 1
        assert world.shut() == []
