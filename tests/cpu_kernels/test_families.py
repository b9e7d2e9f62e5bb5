"""Every family's experts, as their checkpoint builds them, and as an implementation of transformers."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import local_experts as local
import pytest
import torch
from experts_modules import make_experts
from local_experts import local_experts, register_local_experts
from models import tiny
from synthetic import TINY_FAMILIES
from torch import nn

from moeoffload.checkpoint import Checkpoint
from moeoffload.kernels import LayerKernels, grouped_experts

from .experts import DTYPES, call, gated_experts, random_call, random_rows, routes, transformers_result

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_is_the_layers_in_the_models_dtype(dtype: torch.dtype) -> None:
    experts = gated_experts(8, 64, 32, dtype)
    layer = LayerKernels(experts)
    for n_rows in (1, 5, 40):
        rows, slots, weights = random_call(n_rows, 64, dtype, 4, 8)
        for route_weights in (weights, weights.to(dtype)):
            assert torch.equal(
                local_experts(experts, rows, slots, route_weights), call(layer, rows, slots, route_weights).to(dtype)
            )


def test_one_keyword_selects_it() -> None:
    experts = gated_experts(8, 64, 32, torch.bfloat16)
    experts.config._experts_implementation = register_local_experts()
    rows, slots, weights = random_call(3, 64, torch.bfloat16, 2, 8)
    assert torch.equal(experts(rows, slots, weights), local_experts(experts, rows, slots, weights))


def test_parameters_may_be_moved_and_modules_are_let_go() -> None:
    experts = gated_experts(8, 64, 32, torch.bfloat16)
    rows, slots, weights = random_call(3, 64, torch.bfloat16, 2, 8)
    local_experts(experts, rows, slots, weights)
    experts.to(torch.float32)
    got = local_experts(experts, rows.float(), slots, weights)
    torch.testing.assert_close(got, transformers_result(experts, rows.float(), slots, weights))
    experts.down_proj.data = torch.zeros_like(experts.down_proj)
    assert not local_experts(experts, rows.float(), slots, weights).any()
    kept = weakref.ref(experts)
    n_prepared = len(local._prepared)
    del experts
    gc.collect()
    assert kept() is None
    assert len(local._prepared) == n_prepared - 1


def test_gradients_flow_through_transformers() -> None:
    experts = gated_experts(8, 64, 32, torch.float32)
    rows = random_rows(3, 64, torch.float32).requires_grad_()
    slots, weights = routes(3, 2, 8)
    local_experts(experts, rows, slots, weights).sum().backward()
    assert rows.grad is not None


def test_ids_above_the_last_expert_mean_elsewhere_in_expert_parallel() -> None:
    experts = gated_experts(8, 64, 32, torch.bfloat16)
    rows, slots, weights = random_call(4, 64, torch.bfloat16, 2, 8)
    experts._is_expert_parallel = True
    ours = local_experts(experts, rows, slots.masked_fill(slots == 3, 8), weights)
    layer = LayerKernels(experts)
    assert torch.equal(ours, call(layer, rows, slots.masked_fill(slots == 3, -1), weights).bfloat16())
