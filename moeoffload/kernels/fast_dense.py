"""Replaces all dense layers of a model that have fast CPU kernels, in one call."""

from __future__ import annotations

from torch import nn

from moeoffload.kernels import calls
from moeoffload.kernels.dense import accelerate_linears
from moeoffload.kernels.fused_attention import fuse_attention
from moeoffload.kernels.growing_cache import accelerate_cache
from moeoffload.kernels.norm import accelerate_norms
from moeoffload.kernels.sdpa import accelerate_attention


def accelerate_dense(model: nn.Module) -> None:
    """Speeds up linear layers, RMS norms, attention and KV cache of a model on the CPU, mainly in calls of few rows.

    Unknown layers stay as they are; so do calls with gradient or under ``torch.compile``, and linear layers' calls of
    many rows. Results differ from transformers' in the order of sums, and attention rounds less often; they do not
    depend on how many rows are computed together.
    """
    if calls.library() is None:
        return
    accelerate_linears(model)
    accelerate_norms(model)
    fuse_attention(model)
    accelerate_attention(model)
    accelerate_cache(model)
