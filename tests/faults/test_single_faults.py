"""Single faults looked at closely: replies that nobody has asked for, bits that change on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fault_kit.generation import DEMO
from fault_kit.kinds import KINDS
from fault_kit.schedule import Fault, Setup
from fault_kit.world import World

CORRUPTED = next(kind for kind in KINDS if kind.name == "frame corrupted on the link")
N_TWICE = 5


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world")) as made:
        yield made


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
