"""The model of the benchmarks about servers: one layer of qwen3-30b-a3b's geometry, or a checkpoint that is given."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from synthetic import geometry_config, write_checkpoint

from moeoffload.checkpoint import Checkpoint


@dataclass(frozen=True)
class OneLayer:
    """Where the checkpoint lies, what its experts need, and a prompt (1, n) int64 for it."""

    path: Path
    experts_gib: float
    prompt: torch.Tensor

    @classmethod
    def open(
        cls, stack: contextlib.ExitStack, checkpoint: Path | None, *, experts: int, prompt_tokens: int
    ) -> OneLayer:
        """Takes ``checkpoint``, or writes one layer with so many experts, which is gone with ``stack``."""
        if checkpoint is None:
            checkpoint = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "one-layer"
            write_checkpoint(geometry_config("qwen3-30b-a3b", layers=1, experts=experts), checkpoint)
        about = Checkpoint.open(checkpoint)
        n_bytes = sum(layer.n_experts * layer.expert_bytes for layer in about.layers)
        vocab = about.config.get_text_config().vocab_size
        prompt = torch.randint(5, vocab, (1, prompt_tokens), generator=torch.manual_seed(prompt_tokens))
        return cls(checkpoint, n_bytes / (1 << 30), prompt)
