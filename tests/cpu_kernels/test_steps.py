"""A call that is computed in steps has the bits of one that is not, whatever is computed between its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from moeoffload.kernels import KernelWorkspace, LayerKernels, prepare_layer

from .experts import DTYPES, call, gated_experts, random_rows, routes


def stepwise(layer: LayerKernels, inputs: tuple[torch.Tensor, ...], between: Any = lambda: None) -> torch.Tensor:
    """The result of the smallest steps there are, with ``between()`` after each."""
    rows, slots, weights = inputs
    out = torch.full(rows.shape, torch.nan, dtype=torch.float32)
    n_steps = 0
    for _ in layer.in_steps(rows, slots, weights, out, lambda: 0.0):
        n_steps += 1
        between()
    assert n_steps > 4, "it was one step"
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_rows", [1, 5, 150])
def test_steps_have_the_bits_of_one_call(dtype: torch.dtype, n_rows: int) -> None:
    layer = prepare_layer(gated_experts(16, 320, 160, dtype), kernel="tiled")
    inputs = (random_rows(n_rows, 320, dtype), *routes(n_rows, 8, 16, absent=0.2))
    whole = call(layer, *inputs)
    assert torch.equal(stepwise(layer, inputs), whole)
    assert torch.equal(call(layer, *inputs), whole), "a whole call after one in steps"


def test_another_call_in_between_disturbs_neither() -> None:
    layer = prepare_layer(gated_experts(16, 320, 160, torch.bfloat16), kernel="tiled")
    other, urgent = prepare_layer(gated_experts(8, 320, 160, torch.bfloat16, seed=1), kernel="tiled"), KernelWorkspace()
    large = (random_rows(64, 320, torch.bfloat16), *routes(64, 8, 16))
    small = (random_rows(2, 320, torch.bfloat16, seed=2), *routes(2, 4, 8))
    expected, expected_small = call(layer, *large), call(other, *small)
    results = []

    def between() -> None:
        out = torch.full(small[0].shape, torch.nan, dtype=torch.float32)
        other(*small, out, urgent)
        results.append(out)

    assert torch.equal(stepwise(layer, large, between), expected)
    assert all(torch.equal(result, expected_small) for result in results)


def test_experts_with_bias_and_an_activation_of_their_own() -> None:
    config = CONFIG_MAPPING["gpt_oss"](
        hidden_size=128, intermediate_size=96, num_local_experts=8, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    experts = GptOssExperts(config).to(torch.float32).eval()
    for parameter in experts.parameters():
        parameter.requires_grad_(False)
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 10)
    layer = prepare_layer(experts, kernel="tiled")
    inputs = (random_rows(40, 128, torch.float32), *routes(40, 2, 8, absent=0.2))
    assert torch.equal(stepwise(layer, inputs), call(layer, *inputs))


def test_a_slot_that_does_not_exist_is_refused_before_the_first_step() -> None:
    layer = prepare_layer(gated_experts(4, 64, 32, torch.float32), kernel="tiled")
    rows, slots, weights = random_rows(3, 64, torch.float32), *routes(3, 2, 4)
    slots[1, 1] = 4
    with pytest.raises(IndexError, match="slot"):
        next(layer.in_steps(rows, slots, weights, torch.zeros(3, 64), lambda: 0.0))
