from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from moeoffload.checkpoint import Checkpoint

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="session")
def _quiet_and_single_threaded() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny qwen3_moe checkpoint in one file that a test may damage."""
    return models.tiny("qwen3_moe", tmp_path / "tiny")


def reference_model(folder: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """What transformers loads from ``folder``; every key must have found its place."""
    model, report = auto.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model


def assert_read_alone(checkpoint: Checkpoint, layer: int, *, times: int = 8, in_tiles: bool = False) -> None:
    """Each of eight packed experts that are read together, so many times, is the one that is read alone."""
    together: Any = checkpoint.build_experts(layer, [*range(8)] * times, CPU, in_tiles=in_tiles)
    for expert in range(8):
        alone: Any = checkpoint.build_experts(layer, [expert], CPU, in_tiles=in_tiles)
        for name in ("gate_up_proj", "down_proj"):
            for ours, theirs in zip(getattr(together, name), getattr(alone, name), strict=True):
                assert all(torch.equal(data, theirs.data[0]) for data in ours.data[expert::8])
                if theirs.scales is not None:
                    assert all(torch.equal(scales, theirs.scales[0]) for scales in ours.scales[expert::8])


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Let ``change`` edit the tensors of a checkpoint in one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
