"""How a prompt is cut for the pipeline: about even chunks, of a length that depends on nothing but the prompt's."""

from __future__ import annotations

import pytest

from moeoffload.host.granularity import CHUNK_ROWS, LEAST_CHUNK_ROWS, Granularity
from moeoffload.settings import Mode, Pipeline


def chunks(n_rows: int, capacity: int = 4096, *, mode: Mode = Mode.AUTO, fast_host: bool = False) -> list[int]:
    plan = Granularity(mode, 32, Pipeline.ON, fast_host).pipeline_plan(n_rows, capacity)
    assert plan is not None
    return [min(plan.chunk_rows, n_rows - at) for at in range(0, n_rows, plan.chunk_rows)]


@pytest.mark.parametrize(
    ("n_rows", "expected"),
    [(64, [64]), (200, [128, 72]), (384, [192, 192]), (512, [256] * 2), (640, [320] * 2), (2048, [256] * 8)],
)
def test_a_cpu_host_cuts_a_prompt_into_even_chunks(n_rows: int, expected: list[int]) -> None:
    assert chunks(n_rows) == expected


def test_no_chunk_is_much_longer_or_shorter_than_the_best() -> None:
    for n_rows in (*range(1, 3000, 7), 4248, 100_000):
        parts = chunks(n_rows)
        assert sum(parts) == n_rows
        assert max(parts) <= 1.5 * CHUNK_ROWS
        assert len(parts) == 1 or min(parts[:-1]) >= LEAST_CHUNK_ROWS


def test_a_gpu_host_keeps_large_chunks() -> None:
    assert chunks(4096, fast_host=True) == [1024] * 4
    assert chunks(200, fast_host=True) == [128, 72]


@pytest.mark.parametrize("capacity", [1, 100, 300])
def test_a_chunk_fits_a_dispatch(capacity: int) -> None:
    assert max(chunks(1000, capacity)) <= capacity
    assert chunks(1000, capacity, mode=Mode.BATCHED)[0] == capacity


def test_switched_off_there_is_no_plan() -> None:
    assert Granularity(Mode.AUTO, 32, Pipeline.OFF).pipeline_plan(1000, 100) is None
