"""The benchmark of what crosses the wire counts the calls of the very runs that it times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench" / "prefill_ipc.py"
PROMPT = 2600
CHUNKS, LAYERS = 5, 4  # of a generation, which is pipelined; a forward pass without a cache sends three batches a layer


def test_calls_are_those_of_a_generation(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = ["--prompt-tokens", str(PROMPT), "--completion", "2", "--repeats", "1", "--modes", "auto"]
    words += ["--transports", "shared", "--dtypes", "f32", "--json", str(result)]
    subprocess.run([sys.executable, str(BENCH), *words], check=True, capture_output=True, timeout=200)
    rows = json.loads(result.read_text())["rows"]
    (calls,) = [row["calls"] for row in rows if row["mode"] == "auto"]
    assert calls >= CHUNKS * LAYERS  # auto may cut chunks into slices
