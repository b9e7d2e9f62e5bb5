"""What an opened checkpoint says of itself, where it is looked for, its digest; synthetic ones load as real ones."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from models import edit_config
from synthetic import Layout, write_tiny

from moeoffload.checkpoint import Checkpoint, ExpertLayer
from moeoffload.errors import ModelError
from moeoffload.model_name import short_name

from .conftest import CPU, rewrite


def put_in_hub_cache(folder: Path, cache: Path, name: str) -> Path:
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_attributes(tmp_path: Path) -> None:
    write_tiny("deepseek_v3", tmp_path)
    checkpoint = Checkpoint.open(str(tmp_path))
    assert checkpoint.path == tmp_path
    assert checkpoint.model_type == checkpoint.config.model_type == "deepseek_v3"
    assert (checkpoint.hidden_size, checkpoint.top_k) == (64, 2)
    # The first decoder layer is dense: MoE layers are numbered on their own.
    n_weights = 3 * 64 * 32
    assert checkpoint.layers == (
        ExpertLayer(0, "model.layers.1.mlp.experts", 8, 4 * n_weights, n_weights, 32, "f32"),
        ExpertLayer(1, "model.layers.2.mlp.experts", 8, 4 * n_weights, n_weights, 32, "f32"),
    )


def test_a_name_for_a_class_that_transformers_has(tmp_path: Path) -> None:
    """Kimi K2 is DeepSeek V3 under a name that only code in its repository knows."""
    write_tiny("deepseek_v3", tmp_path)
    before = Checkpoint.open(tmp_path)
    edit_config(tmp_path, model_type="kimi_k2")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.model_type == "deepseek_v3"
    assert checkpoint.digest == before.digest


def test_compute_dtype_is_the_given_one_else_the_configs_else_that_of_the_tensors(tmp_path: Path) -> None:
    write_tiny("olmoe", tmp_path, dtype=torch.float16)
    edit_config(tmp_path, dtype="bfloat16")
    assert Checkpoint.open(tmp_path, dtype=torch.float32).dtype is torch.float32
    assert Checkpoint.open(tmp_path).dtype is torch.bfloat16
    edit_config(tmp_path, dtype=None)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.dtype is torch.float16
    assert checkpoint.build_experts(0, [0], CPU).down_proj.dtype is torch.float16
    with pytest.raises(ModelError, match=r"compute dtype torch\.int8: must be one of float64, float32"):
        Checkpoint.open(tmp_path, dtype=torch.int8)


def test_tensors_that_the_model_does_not_know_are_left_alone(tmp_path: Path) -> None:
    """Extra layers for multi-token prediction are stored behind the last decoder layer."""
    write_tiny("deepseek_v3", tmp_path, layers=3)
    edit_config(tmp_path, num_hidden_layers=2)
    assert [layer.module_name for layer in Checkpoint.open(tmp_path).layers] == ["model.layers.1.mlp.experts"]


def test_hub_id_is_taken_from_the_local_cache(tiny: Path, tmp_path: Path) -> None:
    snapshot = put_in_hub_cache(tiny, tmp_path / "hub", "org/tiny")
    assert Checkpoint.open("org/tiny").path == snapshot
    assert Checkpoint.open("org/tiny", revision="main").digest == Checkpoint.open(tiny).digest


def test_incomplete_cache_is_not_taken(tiny: Path, tmp_path: Path) -> None:
    snapshot = put_in_hub_cache(tiny, tmp_path / "hub", "org/tiny")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"org--tiny.*: no weights; needed is"):
        Checkpoint.open("org/tiny")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((hub, f"{hub}.*no such folder, not in the local hub cache, and the hub is not") for hub in ("org/no", "no")),
        *((path, r"no such folder$") for path in ("./no", "/no/at/all", "~/no/at/all", "a/b/c", Path("no"))),
        (Path(__file__), r"a model is a folder, a \.gguf or a \.safetensors file$"),
        ("org/na me", r"no such folder, and not a hub id"),
    ],
)
def test_what_is_nowhere_is_told_with_what_was_tried(name: str | Path, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Checkpoint.open(name)


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


SCRIPT = Path(__file__).parents[2] / "bench" / "make_checkpoint.py"


def test_script_writes_a_checkpoint_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tiny", "olmoe", "--out", str(tmp_path / "out"), "--experts", "10", "--layers", "3", "--dtype", "f32"]
    words += ["--sharded-mb", "1", "--vocab", "1000", "--format", "fp8"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "1 files" in capsys.readouterr().out
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert [layer.n_experts for layer in checkpoint.layers] == [10, 10, 10]
    assert checkpoint.dtype is torch.float32
    assert checkpoint.layers[0].format == "fp8"


def test_the_name_for_clients_is_that_of_the_folder_or_file_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    for name in ("mine/model.safetensors", "mine.gguf"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for reference in ("~/mine", tmp_path / "mine", "~/link", "~/mine/model.safetensors"):
        assert short_name(reference) == "mine"
    assert short_name("~/mine.gguf") == "mine.gguf"
    assert short_name("Qwen/Qwen3-30B-A3B") == "Qwen/Qwen3-30B-A3B"
