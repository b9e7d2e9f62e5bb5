"""Small random models, and as many expert servers as a measurement asks for."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch
from devices import CPU
from servers import expert_server
from synthetic import tiny_config, write_checkpoint

HIDDEN = 256
TOP_K = 8


def small_model(folder: Path, *, experts: int, layers: int) -> Path:
    """A model with hidden size 256 and top-8 routing in ``folder``; an existing one is taken as it is."""
    path = folder / f"experts-{experts}-layers-{layers}"
    if not path.exists():
        config = tiny_config("qwen3_moe", experts=experts, layers=layers)
        config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok = HIDDEN, 64, TOP_K
        config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 64
        config.max_position_embeddings = 32768
        write_checkpoint(config, path, dtype=torch.bfloat16)
    return path


class Fleet:
    """Expert servers, started when first asked for, stopped with ``stack``; all cores but the host's take turns."""

    def __init__(self, stack: contextlib.ExitStack, *options: str, device: str = CPU) -> None:
        self._stack = stack
        self._options = options
        self._device = device
        self._cores = sorted(os.sched_getaffinity(0))[1:] or sorted(os.sched_getaffinity(0))
        self._addresses: list[str] = []

    def addresses(self, n: int) -> list[str]:
        """Addresses of ``n`` servers."""
        while len(self._addresses) < n:
            core = self._cores[len(self._addresses) % len(self._cores)]
            self._addresses.append(self._stack.enter_context(expert_server(core, *self._options, device=self._device)))
        return self._addresses[:n]

    @property
    def n_cores(self) -> int:
        """Cores that servers run on."""
        return len(self._cores)
