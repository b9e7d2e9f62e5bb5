"""The kernels as an experts implementation of transformers in the host's process."""

from __future__ import annotations

import gc
import weakref

import local_experts as local
import pytest
import torch
from local_experts import local_experts, register_local_experts

from moeoffload.kernels import LayerKernels

from .experts import DTYPES, call, gated_experts, random_rows, routes, transformers_result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_is_the_layers_in_the_models_dtype(dtype: torch.dtype) -> None:
    experts = gated_experts(8, 64, 32, dtype)
    layer = LayerKernels(experts)
    for n_rows in (1, 5, 40):
        rows = random_rows(n_rows, 64, dtype)
        slots, weights = routes(n_rows, 4, 8)
        for route_weights in (weights, weights.to(dtype)):
            assert torch.equal(
                local_experts(experts, rows, slots, route_weights), call(layer, rows, slots, route_weights).to(dtype)
            )


def test_one_keyword_selects_it() -> None:
    experts = gated_experts(8, 64, 32, torch.bfloat16)
    experts.config._experts_implementation = register_local_experts()
    rows = random_rows(3, 64, torch.bfloat16)
    slots, weights = routes(3, 2, 8)
    assert torch.equal(experts(rows, slots, weights), local_experts(experts, rows, slots, weights))


def test_parameters_may_be_moved_and_modules_are_let_go() -> None:
    experts = gated_experts(8, 64, 32, torch.bfloat16)
    rows = random_rows(3, 64, torch.bfloat16)
    slots, weights = routes(3, 2, 8)
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
    rows = random_rows(4, 64, torch.bfloat16)
    slots, weights = routes(4, 2, 8)
    experts._is_expert_parallel = True
    ours = local_experts(experts, rows, slots.masked_fill(slots == 3, 8), weights)
    layer = LayerKernels(experts)
    assert torch.equal(ours, call(layer, rows, slots.masked_fill(slots == 3, -1), weights).bfloat16())
