"""About half a minute of what bench/fuzz.py does for ten: a real server under fuzzed frames, calls and connections."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))
from fuzz import Row, fuzz_server, fuzz_targets

SERVER_S = 12.0
TARGETS_S = 8.0
SEED = 7


def told(row: Row) -> None:
    print(row)


def test_a_server_under_fuzzed_frames_and_calls_stays_as_it_was(tmp_path: Path) -> None:
    run = fuzz_server(SERVER_S, SEED, (0, 0), tmp_path, told)
    log = (tmp_path / "server.log").read_text(errors="replace")
    assert not run.failed, f"{run}\n{log[-4000:]}"
    assert run.verdicts["good_request_right"]
    assert run.verdicts["exit_code_0"]
    assert all(row.inputs > 100 for row in run.rows), run.rows
    # Of frames and calls: each part gets as far as results and as far as refusals.
    assert all(row.good and row.refused for row in run.rows[:3]), run.rows


def test_every_parser_fuzzed_with_coverage_raises_nothing_but_our_errors(tmp_path: Path) -> None:
    run = fuzz_targets(TARGETS_S, SEED, tmp_path, told, ("all",))
    if run.skipped:
        pytest.skip(run.skipped[0])
    assert not run.failed, f"{run.rows}, {[path.name for path in tmp_path.iterdir()]}"
    assert run.rows[0].inputs > 1000
