"""The baseline: the same model with the same kernels, its experts in the host process."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from moeoffload.checkpoint.synthetic import geometry_config, write_checkpoint
from moeoffload.kernels.dense import accelerate_linears

SAME_KERNELS: Final = "moeoffload_local"
TRANSFORMERS_OWN: Final = "grouped_mm"


def local_experts() -> str:
    """The experts implementation of the baseline: the servers' kernels, or transformers' own where there are none."""
    if importlib.util.find_spec("moeoffload.kernels.local") is not None:
        importlib.import_module("moeoffload.kernels.local")
    return SAME_KERNELS if SAME_KERNELS in ALL_EXPERTS_FUNCTIONS else TRANSFORMERS_OWN


def load_local(checkpoint: Path) -> Any:
    """The transformers model of ``checkpoint``, all of it in this process, with fast dense layers."""
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation=local_experts(), dtype="auto")
    accelerate_linears(model)
    return model.eval()


def benchmark_checkpoint(folder: Path, layers: int = 4) -> Path:
    """Writes the model that benchmarks use when none is given: Qwen3-30B-A3B geometry with few layers."""
    return write_checkpoint(geometry_config("qwen3-30b-a3b", layers=layers), folder, dtype=torch.bfloat16)
