"""Auto mode chooses the slice size that is fastest for the server, and notices when that changes."""

from __future__ import annotations

import pytest

from moeoffload.host.auto_slice import LOOK_EVERY, SliceLearner

FAST = [(1, 1e-4), (16, 2e-4), (256, 2e-3), (1024, 7e-3)]
SLOW_AT_LARGE = [(1, 1e-4), (16, 4e-4), (64, 1.4e-3), (256, 5e-2), (1024, 2e-1)]


def test_a_fast_server_gets_whole_batches() -> None:
    assert SliceLearner(FAST, 1024, 4).slice_rows(4248) == 1024


def test_a_server_that_is_slow_at_large_batches_gets_small_ones() -> None:
    assert SliceLearner(SLOW_AT_LARGE, 1024, 4).slice_rows(4248) <= 64


def test_calls_of_a_few_rows_are_never_cut() -> None:
    for timings in (FAST, SLOW_AT_LARGE, []):
        learner = SliceLearner(timings, 1024, 4)
        assert all(learner.slice_rows(rows) >= rows for rows in (1, 2, 4))


@pytest.mark.parametrize("n_rows", [5, 64, 1000, 4248])
def test_the_choice_is_within_two_percent_of_the_best_size(n_rows: int) -> None:
    for timings in (FAST, SLOW_AT_LARGE):
        learner = SliceLearner(timings, 1024, 4)
        best = min(learner.total_seconds(n_rows, size) for size in range(4, 1025))
        assert learner.total_seconds(n_rows, learner.slice_rows(n_rows)) <= 1.1 * best


def test_a_server_that_becomes_slow_is_noticed() -> None:
    learner = SliceLearner(FAST, 1024, 4)
    assert learner.slice_rows(4096) == 1024
    for _ in range(40):
        learner.observe(1024, 0.5, 1e-4)
    assert learner.slice_rows(4096) < 1024


def test_a_neighbouring_size_is_looked_at_now_and_then() -> None:
    learner = SliceLearner(FAST, 1024, 4)
    seen = []
    for _ in range(4 * LOOK_EVERY):
        size = learner.look(256)
        seen.append(size)
        learner.observe(size, 1e-3, 1e-4)
    assert 1 <= sum(size != 256 for size in seen) <= 4
    assert all(4 <= size <= 1024 for size in seen)


def test_the_report_says_what_was_chosen_and_why() -> None:
    about = SliceLearner(SLOW_AT_LARGE, 1024, 4).describe()
    assert about["slice_rows"] <= 64
    assert about["us_per_row"]["1024"] > about["us_per_row"]["16"]
