"""The baseline: the same model with the same kernels, its experts in the host process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from moeoffload.checkpoint.synthetic import geometry_config, write_checkpoint

LOCAL = "grouped_mm"


def load_local(checkpoint: Path) -> Any:
    """The transformers model of ``checkpoint``, all of it in this process."""
    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation=LOCAL, dtype="auto").eval()


def benchmark_checkpoint(folder: Path, layers: int = 4) -> Path:
    """Writes the model that benchmarks use when none is given: Qwen3-30B-A3B geometry with few layers."""
    return write_checkpoint(geometry_config("qwen3-30b-a3b", layers=layers), folder, dtype=torch.bfloat16)
