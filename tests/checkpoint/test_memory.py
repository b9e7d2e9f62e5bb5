"""Building a subset reads that subset's bytes and holds little beside the result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import Layout, geometry_config, write_checkpoint

MIB = 1 << 20

# Counts the bytes this process got through read calls, whether from disk or from the kernel's cache, and what it held.
MEASURE = """
import json, sys, torch
from moeoffload.checkpoint import Checkpoint

def proc(name, key):
    return int(next(line for line in open(f"/proc/self/{name}") if line.startswith(key + ":")).split()[1])

torch.set_num_threads(1)
checkpoint = Checkpoint.open(sys.argv[1])
layer = checkpoint.layers[0]
checkpoint.build_experts(0, [0], torch.device("cpu"))
held, read = proc("status", "VmRSS") * 1024, proc("io", "rchar")
experts = range(1, layer.n_experts, 2)
module = checkpoint.build_experts(0, experts, torch.device("cpu"))
print(json.dumps({
    "asked": len(experts) * layer.expert_bytes,
    "built": sum(parameter.nbytes for parameter in module.parameters()),
    "read": proc("io", "rchar") - read,
    "grown": proc("status", "VmHWM") * 1024 - held,
    "mapped": sum(line.endswith(".safetensors\\n") for line in open("/proc/self/maps")),
}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("layout", Layout)
def test_half_of_the_experts_costs_half_of_the_bytes(layout: Layout, tmp_path: Path) -> None:
    # One layer of Qwen3-30B-A3B with a quarter of its experts: 302 MB on disk, every other expert is asked for.
    write_checkpoint(geometry_config("qwen3-30b-a3b", layers=1, experts=32, vocab=320), tmp_path, layout=layout)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    measured = json.loads(result.stdout.splitlines()[-1])
    assert measured["built"] == measured["asked"] == 16 * 3 * 768 * 2048 * 2
    # The files are not mapped, so what was not read through a call was not read at all.
    assert measured["mapped"] == 0
    assert measured["asked"] <= measured["read"] < measured["asked"] + MIB
    assert measured["grown"] < measured["asked"] + 100 * MIB
