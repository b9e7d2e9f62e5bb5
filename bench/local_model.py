"""The baseline: the same model with the same kernels, its experts in the host process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from devices import CPU
from local_experts import register_local_experts
from synthetic import geometry_config, write_checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from moeoffload.huge_pages import empty_weights
from moeoffload.kernels.fast_dense import accelerate_dense


def load_local(checkpoint: Path, device: str = CPU) -> Any:
    """The transformers model of ``checkpoint``, all of it in this process; on a CPU with fast dense layers."""
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, experts_implementation=register_local_experts(), dtype="auto"
    )
    if device != CPU:
        return model.to(device).eval()
    for parameter in model.parameters():
        parameter.data = empty_weights(parameter.shape, parameter.dtype).copy_(parameter.data)
    accelerate_dense(model)
    return model.eval()


def benchmark_checkpoint(folder: Path, layers: int = 4, like: str = "qwen3-30b-a3b") -> Path:
    """Writes the model that benchmarks use when none is given: Qwen3-30B-A3B geometry with few layers."""
    return write_checkpoint(geometry_config(like, layers=layers), folder, dtype=torch.bfloat16)
