"""How a prompt is cut for the pipeline: about even chunks, of a length that depends on nothing but the prompt's."""

from __future__ import annotations

import pytest

from moeoffload.config import Mode, Pipeline
from moeoffload.host.granularity import CHUNK_ROWS, LEAST_CHUNK_ROWS, MASKED_CHUNK_ROWS, Granularity


def chunks(
    n_rows: int, capacity: int = 4096, *, mode: Mode = Mode.AUTO, size: int | None = MASKED_CHUNK_ROWS
) -> list[int]:
    step = Granularity(mode, 32, Pipeline.ON, size).pipeline_rows(n_rows, capacity)
    assert step is not None
    return [min(step, n_rows - at) for at in range(0, n_rows, step)]


@pytest.mark.parametrize(
    ("size", "n_rows", "expected"),
    [
        (MASKED_CHUNK_ROWS, 64, [64]),
        (MASKED_CHUNK_ROWS, 200, [128, 72]),
        (MASKED_CHUNK_ROWS, 384, [192, 192]),
        (MASKED_CHUNK_ROWS, 2048, [256] * 8),
        (CHUNK_ROWS, 512, [256] * 2),
        (CHUNK_ROWS, 2048, [512] * 4),
        (None, 4096, [1024] * 4),  # a GPU host
        (None, 200, [128, 72]),
    ],
)
def test_a_prompt_is_cut_into_even_chunks(size: int | None, n_rows: int, expected: list[int]) -> None:
    assert chunks(n_rows, size=size) == expected


@pytest.mark.parametrize("size", [CHUNK_ROWS, MASKED_CHUNK_ROWS])
def test_no_chunk_is_much_longer_or_shorter_than_the_best(size: int) -> None:
    for n_rows in (*range(1, 3000, 7), 4248, 100_000):
        parts = chunks(n_rows, size=size)
        assert sum(parts) == n_rows
        assert max(parts) <= 1.5 * size
        assert len(parts) == 1 or min(parts[:-1]) >= LEAST_CHUNK_ROWS


@pytest.mark.parametrize("capacity", [1, 100, 300])
def test_a_chunk_fits_a_dispatch(capacity: int) -> None:
    assert max(chunks(1000, capacity)) <= capacity
    assert chunks(1000, capacity, mode=Mode.BATCHED)[0] == capacity
    assert Granularity(Mode.AUTO, 32, Pipeline.OFF).pipeline_rows(1000, capacity) is None
