"""The baseline: the same model with the same kernels, its experts in the host process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from synthetic import geometry_config, write_checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from moeoffload.kernels.fast_dense import accelerate_dense
from moeoffload.kernels.local import NAME, register_local_experts

SAME_KERNELS: Final = NAME


def local_experts() -> str:
    """The experts implementation of the baseline: the servers' kernels, registered with transformers."""
    register_local_experts()
    return SAME_KERNELS


def load_local(checkpoint: Path) -> Any:
    """The transformers model of ``checkpoint``, all of it in this process, with fast dense layers."""
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation=local_experts(), dtype="auto")
    accelerate_dense(model)
    return model.eval()


def benchmark_checkpoint(folder: Path, layers: int = 4) -> Path:
    """Writes the model that benchmarks use when none is given: Qwen3-30B-A3B geometry with few layers."""
    return write_checkpoint(geometry_config("qwen3-30b-a3b", layers=layers), folder, dtype=torch.bfloat16)
