"""A fault of every kind, drawn from a seed, over generation: same tokens, in time, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_kit.kinds import KINDS
from fault_kit.schedule import SETUPS, Setup, draw_faults
from fault_kit.world import World

SEED = 20
FAULTS = draw_faults(len(KINDS), SEED)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world")) as made:
        yield made


def test_the_slice_has_every_kind_and_every_setup() -> None:
    assert {fault.kind.name for fault in FAULTS} == {kind.name for kind in KINDS}
    assert {fault.setup for fault in FAULTS} == set(SETUPS)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_faults_cost_a_moment_and_no_token(world: World, setup: Setup) -> None:
    world.open(setup)
    try:
        outcomes = [world.run(fault) for fault in FAULTS if fault.setup == setup]
    finally:
        left = world.shut()
    bad = [outcome for outcome in outcomes if not outcome.ok]
    assert not bad
    assert left == []
    noticed = {kind.name for kind in KINDS if kind.loses}
    unnoticed = [outcome for outcome in outcomes if outcome.kind in noticed and not outcome.lost]
    assert not unnoticed, "a fault that the host did not notice tests nothing"
    # One line when a server is lost and one when it is back, for every part of the experts that changed hands.
    assert [outcome for outcome in outcomes if outcome.warnings > outcome.lost + outcome.returned] == []
