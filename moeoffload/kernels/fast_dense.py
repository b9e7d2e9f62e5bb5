"""All that makes dense layers fast at few rows on a CPU, in one call."""

from __future__ import annotations

from torch import nn

from moeoffload.kernels import calls
from moeoffload.kernels.dense import accelerate_linears
from moeoffload.kernels.norm import accelerate_norms
from moeoffload.kernels.parameters import accelerate_parameters
from moeoffload.kernels.sdpa import accelerate_attention


def accelerate_dense(model: nn.Module) -> None:
    """Makes linear layers, routers, root-mean-square norms and attention of a model on the CPU fast in few-row calls.

    What it does not know stays as it is, and so do calls of many rows, with gradient or under ``torch.compile``.
    Results differ from transformers' in the order of sums, and attention rounds once instead of several times; they do
    not depend on how many rows are computed together.
    """
    if calls.library() is None:
        return
    accelerate_linears(model)
    accelerate_parameters(model)
    accelerate_norms(model)
    accelerate_attention(model)
