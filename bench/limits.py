"""What one core, or a GPU, allows: how fast it reads, how fast it multiplies, and what a model asks of both."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numba
import numpy as np
import torch
from devices import CPU

from moeoffload.checkpoint import Checkpoint


@numba.njit(fastmath=True, nogil=True)
def _sum(values: np.ndarray) -> int:
    total = 0
    for value in values:
        total += value
    return total


def read_bandwidth(device: str = CPU, n_bytes: int = 256 << 20) -> float:
    """Bytes per second that one core reads from memory, or that a copy on a GPU moves; the best of several tries, since
    a limit is what can be."""
    if device != CPU:
        from kernels_cuda import Clock, copy_bytes_per_s  # not before: it imports models

        on = torch.device(device)
        return max(copy_bytes_per_s(Clock(on, 10), on, n_bytes) for _ in range(3))
    values = np.ones(n_bytes // 8, dtype=np.int64)
    tensor = torch.from_numpy(values)
    _sum(values[:8])
    best = float("inf")
    for _ in range(7):
        for read in (_sum, lambda _: tensor.sum()):
            started = perf_counter()
            read(values)
            best = min(best, perf_counter() - started)
    return n_bytes / best


def matmul_flops(dtype: torch.dtype, device: str = CPU, seconds: float = 2.0) -> float:
    """Floating-point operations per second of torch's best square product in ``dtype`` with the threads it has, or on a
    GPU."""
    if device != CPU:
        from kernels_cuda import Clock, product_flop_per_s

        on = torch.device(device)
        return max(product_flop_per_s(Clock(on, 10), on, dtype, size) for size in (2048, 4096, 8192))
    best = 0.0
    for size in (1024, 2048, 3072):
        left, right = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
        torch.mm(left, right)
        end = perf_counter() + seconds / 3
        while perf_counter() < end:
            started = perf_counter()
            torch.mm(left, right)
            best = max(best, 2 * size**3 / (perf_counter() - started))
    return best


@dataclass(frozen=True)
class Demand:
    """What one model asks for. Weights are counted once per token; the input embedding is looked up, not read."""

    dense_bytes: int
    expert_bytes: int
    dense_flop_per_token: float
    head_flop: float
    expert_flop_per_token: float
    attention_flop_per_pair: float

    @classmethod
    def of(cls, model: Any, checkpoint: Checkpoint) -> Demand:
        """Counts the weights of ``model``, whose ``checkpoint`` says what its experts are."""
        config = model.config.get_text_config()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        item = checkpoint.dtype.itemsize
        looked_up = 0 if embedding is head else embedding.nbytes
        dense = checkpoint.dense_bytes - looked_up
        experts = sum(layer.expert_bytes * min(checkpoint.top_k, layer.n_experts) for layer in checkpoint.layers)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            dense_bytes=dense,
            expert_bytes=experts,
            dense_flop_per_token=2.0 * (dense - head.nbytes) / item,
            head_flop=2.0 * head.numel(),
            expert_flop_per_token=2.0 * experts / item,
            # scores and values: two products of head_dim multiply-adds for each head, layer and pair of positions
            attention_flop_per_pair=4.0 * config.num_hidden_layers * config.num_attention_heads * head_dim,
        )

    def prefill_flop(self, n_tokens: int) -> tuple[float, float]:
        """Operations of the dense layers (logits of the last token only) and of the routed experts."""
        pairs = n_tokens * (n_tokens + 1) / 2
        dense = n_tokens * self.dense_flop_per_token + self.head_flop + pairs * self.attention_flop_per_pair
        return dense, n_tokens * self.expert_flop_per_token

    def decode_bytes(self, cache_bytes: int) -> int:
        """Bytes that must be read for one token of one sequence."""
        return self.dense_bytes + self.expert_bytes + cache_bytes
