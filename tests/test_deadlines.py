"""How long a dispatch may take: by what its server timed before, and by how long others took lately."""

from __future__ import annotations

import pytest

from moeoffload.host.deadlines import Deadlines


def test_a_deadline_follows_the_timings_and_the_waits_between_floor_and_ceiling() -> None:
    deadlines = Deadlines(2.0, 60.0, 4, [(256, 0.5), (1, 0.01)])
    assert [deadlines.of(rows) for rows in (1, 256, 512, 4096)] == [2.0, 16.0, 32.0, 60.0]
    assert deadlines.of(100) == pytest.approx(8 * 4 * (0.01 + 99 / 255 * 0.49))
    deadlines.waited(1.0)
    assert deadlines.of(1) == 8.0
    for _ in range(1000):
        deadlines.waited(0.001)
    assert deadlines.of(1) == 2.0
    assert Deadlines(2.0, 60.0, 4, []).of(4096) == 2.0
