"""Synthetic checkpoints, by which families are tested and servers measured, load in transformers as real ones do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from synthetic import geometry_config, tiny_config, write_checkpoint

from moeoffload.checkpoint import Checkpoint
from moeoffload.errors import ModelError

from .conftest import reference_model

SCRIPT = Path(__file__).parents[2] / "bench" / "make_checkpoint.py"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3-30b-a3b", "model.layers.0.mlp.experts.3.gate_proj.weight"),
        ("mixtral-8x7b", "model.layers.0.block_sparse_moe.experts.3.w1.weight"),
        ("olmoe-1b-7b", "model.layers.0.mlp.experts.3.gate_proj.weight"),
        ("gpt-oss-20b", "model.layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_names_are_those_of_the_originals(name: str, expected: str, tmp_path: Path) -> None:
    config = geometry_config(name, layers=1, experts=4, vocab=320)
    # The names do not depend on the widths, and narrow experts are written faster.
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads = 64, 4, 2
    config.intermediate_size, config.moe_intermediate_size = 32, 32
    write_checkpoint(config, tmp_path, dtype=torch.float32)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert expected in file.keys()  # noqa: SIM118
    reference_model(tmp_path)


def test_script_writes_a_checkpoint_that_loads(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "olmoe", "--out", str(tmp_path / "out"), "--experts", "10"]
    command += ["--layers", "3", "--dtype", "f32", "--sharded-mb", "1", "--vocab", "1000", "--format", "fp8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=SCRIPT.parents[1],
                          env={"PYTHONPATH": str(SCRIPT.parents[1]), "HF_HUB_OFFLINE": "1"})  # fmt: skip
    assert "1 files" in done.stdout
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert [layer.n_experts for layer in checkpoint.layers] == [10, 10, 10]
    assert checkpoint.dtype is torch.float32
    assert checkpoint.layers[0].format == "fp8"


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match="no such tiny family; there are mixtral"):
        tiny_config("gpt2")
    with pytest.raises(ModelError, match="no such geometry; there are qwen3-30b-a3b"):
        geometry_config("gpt2")
