"""Single faults looked at closely: a stopped server, one with another model, replies that nobody has asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fault_kit.generation import DEMO
from fault_kit.kinds import KINDS
from fault_kit.processes import wait_for
from fault_kit.schedule import Fault, Setup
from fault_kit.world import WHOLE_TIMEOUT_S, World

from moeoffload.control.client import ControlClient

STOPPED = next(kind for kind in KINDS if kind.name == "stopped")
CORRUPTED = next(kind for kind in KINDS if kind.name == "frame corrupted on the link")
LONGER_THAN_DEADLINE_S = 3.5
N_TWICE = 5


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world")) as made:
        yield made


@pytest.mark.parametrize("setup", [Setup("shared", "replica"), Setup("stream", "fallback")], ids=str)
def test_a_stopped_server_is_noticed_replaced_and_used_again(world: World, setup: Setup) -> None:
    world.open(setup)
    try:
        outcome = world.run(Fault(0, setup, STOPPED, 0, 0.3, LONGER_THAN_DEADLINE_S, before_frames=True))
        assert outcome.ok, outcome
        assert outcome.lost == outcome.returned > 0
        assert outcome.replica_calls + outcome.fallback_calls > 0
        assert outcome.whole_s is not None
        assert outcome.whole_s < WHOLE_TIMEOUT_S
        before = _requests(world)
        assert world.generate() == world.expected
        assert _requests(world) > before, "it is attached again, and computes again"
    finally:
        assert world.shut() == []


def _requests(world: World) -> int:
    """What the server that was stopped has computed so far."""
    client = ControlClient(world.stations[0].server.address)
    try:
        return client.stats(WHOLE_TIMEOUT_S).requests
    finally:
        client.close()


def test_a_server_restarted_with_another_model_is_refused(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.open(Setup("shared", "fallback"))
    station = world.stations[1]
    try:
        with caplog.at_level("INFO", "moeoffload.host"):
            station.kill()
            station.start("--model", str(world.other_model))
            assert world.generate() == world.expected
            wait_for(lambda: "model digest" in caplog.text, "the refusal", WHOLE_TIMEOUT_S)
            line = next(line for line in caplog.text.splitlines() if "model digest" in line)
            assert station.address in line
            assert not world.in_use()
            assert world.generate() == world.expected
        station.kill()
        station.start()
        wait_for(world.in_use, "the right model in use", WHOLE_TIMEOUT_S)
        assert world.generate() == world.expected
    finally:
        assert world.shut() == []


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
    setup = Setup("stream", "fallback")
    kind = replace(CORRUPTED, strike=lambda scene, station: station.proxy.corrupt(1), loses=True)
    with World(
        tmp_path, "--insecure", "--model-root", str(DEMO)
    ) as world:  # what makes a server on loopback encrypt, too
        world.open(setup)
        outcome = world.run(Fault(0, setup, kind, 1, 0.3, 0.0, before_frames=True))
        assert outcome.ok, outcome
        assert outcome.lost == outcome.returned == 1
        assert world.shut() == []
