"""The benchmark of what crosses the wire counts the calls of the very runs that it times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from conftest import DEMO, expert_server

from moeoffload import open_model

BENCH = Path(__file__).parents[1] / "bench" / "prefill_ipc.py"
PROMPT = 2600  # five chunks of the pipeline, three batches without it


def test_calls_are_those_of_a_generation(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = ["--prompt-tokens", str(PROMPT), "--completion", "2", "--repeats", "1", "--modes", "auto"]
    words += ["--transports", "shared", "--dtypes", "f32", "--json", str(result)]
    subprocess.run([sys.executable, str(BENCH), *words], check=True, capture_output=True, timeout=200)
    rows = json.loads(result.read_text())["rows"]
    with (
        expert_server(tmp_path, "--batch-capacity", "4096") as server,
        open_model(DEMO, experts=[server.address], transport="shared", dtype="f32", device="cpu") as offloaded,
    ):
        prompt = torch.randint(5, 64, (1, PROMPT), generator=torch.manual_seed(0))
        offloaded.model.generate(prompt, max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0)
        expected = offloaded.report().phases["prefill"]["calls"]
    assert [row["calls"] for row in rows if row["mode"] == "auto"] == [expected]
