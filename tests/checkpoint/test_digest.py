"""The digest says whether two sides hold the same model: no more, no less."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from synthetic import Layout, write_tiny

from moeoffload.checkpoint import Checkpoint

from .conftest import rewrite
from .test_open import edit_config


def digest(folder: Path, dtype: torch.dtype | None = None) -> str:
    return Checkpoint.open(folder, dtype=dtype).digest


def test_same_for_copies_reshardings_and_compute_dtypes(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "elsewhere")
    write_tiny("qwen3_moe", tmp_path / "sharded", shard_bytes=100_000)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert digest(tiny) == digest(tmp_path / "elsewhere") == digest(tmp_path / "sharded")
    assert digest(tiny) == digest(tiny, torch.bfloat16)


def test_config_values_count_only_if_they_change_what_is_computed(tiny: Path) -> None:
    before = digest(tiny)
    assert len(bytes.fromhex(before)) == 32
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    edit_config(tiny, transformers_version="5.17.0", _name_or_path="somewhere", dtype="bfloat16")
    assert digest(tiny) == before
    edit_config(tiny, rms_norm_eps=1e-3)
    assert digest(tiny) != before


def test_differs_for_other_weights_dtypes_layouts_and_names(tmp_path: Path) -> None:
    folders = [
        write_tiny("qwen3_moe", tmp_path / "0"),
        write_tiny("qwen3_moe", tmp_path / "1", seed=1),
        write_tiny("qwen3_moe", tmp_path / "2", dtype=torch.bfloat16),
        write_tiny("qwen3_moe", tmp_path / "3", layout=Layout.FUSED),
        write_tiny("qwen3_moe", tmp_path / "4"),
    ]
    rewrite(folders[4], lambda tensors: tensors.update({"other": tensors.pop("lm_head.weight")}))
    assert len({digest(folder) for folder in folders}) == len(folders)


@pytest.mark.parametrize("row", [0, -1])
def test_differs_when_the_first_or_last_value_of_a_tensor_differs(row: int, tiny: Path) -> None:
    before = digest(tiny)
    rewrite(tiny, lambda tensors: tensors["model.layers.1.mlp.experts.3.up_proj.weight"][row, row].add_(1e-3))
    assert digest(tiny) != before
