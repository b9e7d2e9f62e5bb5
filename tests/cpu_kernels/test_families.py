"""Every family's experts, as their checkpoint builds them, and as an implementation of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from experts_modules import make_experts
from models import tiny
from synthetic import TINY_FAMILIES
from torch import nn

from moeoffload.checkpoint import Checkpoint
from moeoffload.kernels import LayerKernels, grouped_experts

from .experts import DTYPES, call, gated_experts, random_call

TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-18}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_family(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.open(tiny(family, tmp_path), dtype=dtype)
    experts = checkpoint.build_experts(len(checkpoint.layers) - 1, [5, 0, 3, 6, 1], torch.device("cpu"))
    for parameter in experts.parameters():
        if parameter.dim() == 2:
            # Biases are written as zeros.
            parameter.copy_(torch.randn(parameter.shape))
    inputs = []
    for n_rows in (1, 3, 20):
        rows, slots, weights = random_call(n_rows, checkpoint.hidden_size, dtype, 3, 5, seed=n_rows, absent=0.3)
        inputs += [(rows, slots, weights), (rows, slots, weights.to(dtype))]
    before = [grouped_experts(experts, *some) for some in inputs]
    values = {name: parameter.clone() for name, parameter in experts.named_parameters()}

    layer = LayerKernels(experts, kernel="tiled")
    for some, expected in zip(inputs, before, strict=True):
        torch.testing.assert_close(call(layer, *some), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for name, parameter in experts.named_parameters():
        assert torch.equal(parameter, values[name])
    after = grouped_experts(experts, *inputs[-1])
    torch.testing.assert_close(after, before[-1], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_transposed_weights_are_turned_in_their_own_memory(tmp_path: Path) -> None:
    experts = Checkpoint.open(tiny("gpt_oss", tmp_path)).build_experts(0, [0, 1, 2], torch.device("cpu"))
    places = [parameter.data_ptr() for parameter in experts.parameters()]
    LayerKernels(experts)
    LayerKernels(experts)
    assert [parameter.data_ptr() for parameter in experts.parameters()] == places


def test_norm_after_each_expert_and_no_gate() -> None:
    experts = make_experts("ungated-relu2", 4, 64, 32, torch.bfloat16)
    experts.has_post_expert_norm = True
    experts.post_expert_norm = nn.RMSNorm(64, dtype=torch.bfloat16).requires_grad_(False)
    rows, slots, weights = random_call(6, 64, torch.bfloat16, 2, 4, absent=0.2)
    expected = grouped_experts(experts, rows, slots, weights)
    ours = call(LayerKernels(experts, kernel="tiled"), rows, slots, weights)
    torch.testing.assert_close(ours, expected, rtol=2**-6, atol=2**-6)


def test_what_falls_back_says_why() -> None:
    experts = gated_experts(4, 64, 32, torch.float64)
    layer = LayerKernels(experts)
    assert layer.falls_back == "dtype torch.float64"
    assert layer.kernel_for(1) == "grouped"
    with pytest.raises(ValueError, match=layer.falls_back):
        LayerKernels(experts, kernel="tiled")
