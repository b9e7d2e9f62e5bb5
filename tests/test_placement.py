"""Placement: one owner for each expert, within memory, even where it can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeoffload.errors import PlacementError
from moeoffload.placement import ExpertTable, MemoryOffer, choose_local, fair_shares, place_experts


def offers_of(*sizes: int) -> list[MemoryOffer]:
    return [MemoryOffer(f"10.0.0.{i}:50051", size) for i, size in enumerate(sizes)]


def place(
    counts: list[int], sizes: list[int], offers: list[MemoryOffer], speeds: list[float] | None = None
) -> list[ExpertTable]:
    return place_experts([range(count) for count in counts], sizes, offers, speeds)


@given(
    usage=st.lists(st.lists(st.integers(0, 500), min_size=24, max_size=24), min_size=1, max_size=5),
    offered=st.lists(st.integers(0, 6000), min_size=1, max_size=4),
    speeds=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    size=st.integers(1, 100),
    known=st.booleans(),
)
def test_every_expert_has_one_owner_and_no_server_more_than_it_offered(
    usage: list[list[int]], offered: list[int], speeds: list[float], size: int, known: bool
) -> None:
    sizes, experts = [size] * len(usage), [range(24)] * len(usage)
    how = (speeds[: len(offered)], usage) if known else ()
    try:
        tables = place_experts(experts, sizes, offers_of(*offered), *how)
    except PlacementError:
        assert sum(n // size for n in offered) < 24 * len(usage)
        return
    for layer in range(len(usage)):
        assert sorted(expert for table in tables for expert in table.layers[layer]) == list(range(24))
        for table in () if known else tables:  # each has a range
            assert list(table.layers[layer]) == list(range(24))[slice(*ends(table.layers[layer]))]
    for table, limit in zip(tables, offered, strict=True):
        assert sum(len(held) * size for held in table.layers) <= limit


def ends(held: tuple[int, ...]) -> tuple[int, int]:
    return (held[0], held[-1] + 1) if held else (0, 0)


def test_servers_with_enough_memory_get_equal_parts_of_every_layer() -> None:
    tables = place([128] * 4, [100] * 4, offers_of(10**9, 10**6, 10**7))
    for layer in range(4):
        parts = [len(table.layers[layer]) for table in tables]
        assert max(parts) - min(parts) <= 1
    assert max(table.n_experts for table in tables) - min(table.n_experts for table in tables) <= 2


def test_a_small_server_gets_what_it_holds_and_the_others_share_the_rest() -> None:
    tables = place([100] * 2, [10] * 2, offers_of(400, 10**6, 10**6))
    assert [table.n_experts for table in tables] == [40, 80, 80]


def test_statistics_make_servers_finish_at_the_same_time() -> None:
    usage = [[1000 // (rank + 1) for rank in range(64)], [1000 // (64 - rank) for rank in range(64)]]
    speeds = [4.0, 1.0, 2.0]
    tables = place_experts([range(64)] * 2, [10] * 2, offers_of(10**6, 10**6, 10**6), speeds, usage)
    for layer, counts in enumerate(usage):
        times = [
            sum(counts[e] for e in table.layers[layer]) / speed for table, speed in zip(tables, speeds, strict=True)
        ]
        assert max(times) <= 1.1 * sum(times) / 3


def test_what_does_not_fit_is_told_as_a_table() -> None:
    with pytest.raises(PlacementError) as error:
        place([128], [1 << 30], offers_of(60 << 30, 20 << 30))
    lines = str(error.value).splitlines()
    assert "do not fit" in lines[0]
    table = {line.split()[0]: float(line.split()[1]) for line in lines[1:]}
    assert table == {"needed": 128, "10.0.0.0:50051": 60, "10.0.0.1:50051": 20, "offered": 80, "missing": 48}


def test_equal_tables_have_equal_digests_and_others_do_not() -> None:
    first, second = place([8], [1], offers_of(100, 100))
    again, _ = place([8], [1], offers_of(100, 100))
    assert first.digest == again.digest != second.digest


def test_shares_follow_the_speeds_within_the_memory() -> None:
    tables = place([100] * 3, [10] * 3, offers_of(10**6, 10**6), [4.0, 1.0])
    assert [table.n_experts for table in tables] == [240, 60]
    tables = place([100] * 3, [10] * 3, offers_of(1500, 10**6), [4.0, 1.0])
    assert [table.n_experts for table in tables] == [150, 150]


@given(need=st.floats(0, 1000), limits=st.lists(st.floats(0, 1000), min_size=1, max_size=5), data=st.data())
def test_fair_shares_add_up_and_respect_limits(need: float, limits: list[float], data: st.DataObject) -> None:
    speeds = data.draw(st.lists(st.floats(0.01, 100), min_size=len(limits), max_size=len(limits)))
    shares = fair_shares(need, limits, speeds)
    assert all(0 <= share <= limit * (1 + 1e-9) for share, limit in zip(shares, limits, strict=True))
    assert abs(sum(shares) - min(need, sum(limits))) <= 1e-6 * max(1, need)


def test_the_most_used_experts_stay_on_the_host() -> None:
    usage = [[5, 1, 9, 1], [2, 8, 0, 7]]
    assert choose_local([4, 4], [10, 10], 40, usage).layers == ((2, 0)[::-1], (1, 3))
    assert choose_local([4, 4], [10, 10], 49).layers == ((0, 1), (0, 1))
    assert choose_local([4, 4], [10, 10], 9).n_experts == 0
    assert choose_local([4, 4], [10, 10], 1000).n_experts == 8
    rest = [expert for expert in range(4) if expert not in choose_local([4, 4], [10, 10], 40, usage).layers[0]]
    assert sorted(e for table in place_experts([rest], [1], offers_of(9, 9)) for e in table.layers[0]) == rest == [1, 3]
