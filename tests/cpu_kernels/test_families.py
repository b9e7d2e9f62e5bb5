"""Every family's experts, as their checkpoint builds them: the tiled kernel serves all, whatever their layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_kernels.experts_modules import make_experts
from synthetic import TINY_FAMILIES, write_tiny
from torch import nn

from moeoffload.checkpoint import Checkpoint
from moeoffload.kernels import GroupedKernel, LayerKernels

from .experts import DTYPES, call, gated_experts, random_rows, routes

TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-18}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {family: write_tiny(family, folder / family) for family in TINY_FAMILIES}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_family(checkpoints: dict[str, Path], family: str, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.open(checkpoints[family], dtype=dtype)
    experts = checkpoint.build_experts(len(checkpoint.layers) - 1, [5, 0, 3, 6, 1], torch.device("cpu"))
    for parameter in experts.parameters():
        if parameter.dim() == 2:
            # Biases are written as zeros.
            parameter.copy_(torch.randn(parameter.shape))
    inputs = []
    for n_rows in (1, 3, 20):
        rows = random_rows(n_rows, checkpoint.hidden_size, dtype, seed=n_rows)
        slots, weights = routes(n_rows, 3, 5, seed=n_rows, absent=0.3)
        inputs += [(rows, slots, weights), (rows, slots, weights.to(dtype))]
    before = [GroupedKernel()(experts, *some) for some in inputs]
    values = {name: parameter.clone() for name, parameter in experts.named_parameters()}

    layer = LayerKernels(experts, kernel="tiled")
    for some, expected in zip(inputs, before, strict=True):
        torch.testing.assert_close(call(layer, *some), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for name, parameter in experts.named_parameters():
        assert torch.equal(parameter, values[name])
    after = GroupedKernel()(experts, *inputs[-1])
    torch.testing.assert_close(after, before[-1], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_transposed_weights_are_turned_in_their_own_memory(checkpoints: dict[str, Path]) -> None:
    experts = Checkpoint.open(checkpoints["gpt_oss"]).build_experts(0, [0, 1, 2], torch.device("cpu"))
    places = [parameter.data_ptr() for parameter in experts.parameters()]
    LayerKernels(experts)
    LayerKernels(experts)
    assert [parameter.data_ptr() for parameter in experts.parameters()] == places


def test_norm_after_each_expert_and_no_gate() -> None:
    experts = make_experts("ungated-relu2", 4, 64, 32, torch.bfloat16)
    experts.has_post_expert_norm = True
    experts.post_expert_norm = nn.RMSNorm(64, dtype=torch.bfloat16).requires_grad_(False)
    rows = random_rows(6, 64, torch.bfloat16)
    slots, weights = routes(6, 2, 4, absent=0.2)
    expected = GroupedKernel()(experts, rows, slots, weights)
    ours = call(LayerKernels(experts, kernel="tiled"), rows, slots, weights)
    torch.testing.assert_close(ours, expected, rtol=2**-6, atol=2**-6)


def test_what_falls_back_says_why() -> None:
    experts = gated_experts(4, 64, 32, torch.float64)
    layer = LayerKernels(experts)
    assert layer.falls_back == "dtype torch.float64"
    assert layer.kernel_for(1) == "grouped"
    with pytest.raises(ValueError, match=layer.falls_back):
        LayerKernels(experts, kernel="tiled")
