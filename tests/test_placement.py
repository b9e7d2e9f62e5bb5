"""Placement: one owner for each expert, within memory, even where it can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeoffload.errors import PlacementError
from moeoffload.placement import MemoryOffer, place_experts


def offers_of(*sizes: int) -> list[MemoryOffer]:
    return [MemoryOffer(f"10.0.0.{i}:50051", size) for i, size in enumerate(sizes)]


def bytes_of(table: object, sizes: list[int]) -> int:
    return sum(len(held) * size for held, size in zip(table.layers, sizes, strict=True))  # type: ignore[attr-defined]


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    size=st.integers(1, 1000),
    offered=st.lists(st.integers(0, 60_000), min_size=1, max_size=5),
)
def test_every_expert_has_one_owner_and_no_server_more_than_it_offered(
    counts: list[int], size: int, offered: list[int]
) -> None:
    sizes = [size] * len(counts)
    try:
        tables = place_experts(counts, sizes, offers_of(*offered))
    except PlacementError:
        assert sum(n // size for n in offered) < sum(counts)
        return
    for layer, count in enumerate(counts):
        assert sorted(expert for table in tables for expert in table.layers[layer]) == list(range(count))
    for table, limit in zip(tables, offered, strict=True):
        assert bytes_of(table, sizes) <= limit


def test_servers_with_enough_memory_get_equal_parts_of_every_layer() -> None:
    tables = place_experts([128] * 4, [100] * 4, offers_of(10**9, 10**6, 10**7))
    for layer in range(4):
        parts = [len(table.layers[layer]) for table in tables]
        assert max(parts) - min(parts) <= 1
    assert max(table.n_experts for table in tables) - min(table.n_experts for table in tables) <= 2


def test_a_small_server_gets_what_it_holds_and_the_others_share_the_rest() -> None:
    tables = place_experts([100] * 2, [10] * 2, offers_of(400, 10**6, 10**6))
    assert [table.n_experts for table in tables] == [40, 80, 80]


def test_a_server_holds_a_contiguous_range() -> None:
    for table in place_experts([60], [1], offers_of(100, 100, 100)):
        assert list(table.layers[0]) == list(range(table.layers[0][0], table.layers[0][-1] + 1))


def test_what_does_not_fit_is_told_as_a_table() -> None:
    with pytest.raises(PlacementError) as error:
        place_experts([128], [1 << 30], offers_of(60 << 30, 20 << 30))
    lines = str(error.value).splitlines()
    assert "do not fit" in lines[0]
    table = {line.split()[0]: float(line.split()[1]) for line in lines[1:]}
    assert table == {"needed": 128, "10.0.0.0:50051": 60, "10.0.0.1:50051": 20, "offered": 80, "missing": 48}


def test_equal_tables_have_equal_digests_and_others_do_not() -> None:
    first, second = place_experts([8], [1], offers_of(100, 100))
    again, _ = place_experts([8], [1], offers_of(100, 100))
    assert first.digest == again.digest != second.digest
