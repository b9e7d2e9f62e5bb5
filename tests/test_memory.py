"""The host holds no expert byte and each server only its own experts: measured on a layer of a real geometry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

N_EXPERTS = 48
EXPERT_MIB = N_EXPERTS * 3 * 768 * 2048 * 2 / (1 << 20)


def test_peak_memory_stays_near_what_each_process_must_hold(tmp_path: Path) -> None:
    checkpoint, result = tmp_path / "checkpoint", tmp_path / "memory.json"
    make = [
        sys.executable,
        "bench/make_checkpoint.py",
        "--like",
        "qwen3-30b-a3b",
        "--layers",
        "1",
        "--experts",
        str(N_EXPERTS),
    ]
    subprocess.run([*make, "--out", str(checkpoint)], cwd=ROOT, check=True, timeout=240)
    measure = [sys.executable, "bench/memory.py", "--checkpoint", str(checkpoint), "--json", str(result)]
    # As a user's processes are: the tests' own Triton interpreter would be loaded into them.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Exits with 1 when a peak is over its limit.
    subprocess.run(measure, cwd=ROOT, check=True, timeout=240, env=environment)
    host, *servers = json.loads(result.read_text())["rows"]
    assert sum(server["holds_mib"] for server in servers) == EXPERT_MIB
    assert host["holds_mib"] < 400
