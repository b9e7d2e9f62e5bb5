"""Routes: absent ones, repeated ones, none at all, and those that do not exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_kernels.experts_modules import reference

from moeoffload.kernels import KernelInput, LayerKernels

from .experts import DTYPES, call, gated_experts, random_rows, routes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_absent_routes_add_nothing_whatever_their_weight(dtype: torch.dtype) -> None:
    layer = LayerKernels(gated_experts(4, 64, 32, dtype), kernel="tiled")
    rows = random_rows(3, 64, dtype)
    slots = torch.tensor([[-1, 2], [-1, -1], [0, -1]])
    weights = torch.tensor([[torch.nan, 0.5], [torch.inf, torch.nan], [0.25, torch.inf]])
    out = call(layer, rows, slots, weights)
    assert torch.equal(out[1], torch.zeros(64))
    assert torch.equal(out[0:1], call(layer, rows[0:1], slots[0:1, 1:], weights[0:1, 1:]))
    assert torch.equal(out[2:3], call(layer, rows[2:3], slots[2:3, :1], weights[2:3, :1]))


def test_no_rows_no_top_k_and_no_route_present() -> None:
    layer = LayerKernels(gated_experts(4, 64, 32, torch.bfloat16))
    assert call(layer, torch.empty(0, 64).bfloat16(), torch.empty(0, 2).long(), torch.empty(0, 2)).shape == (0, 64)
    for slots in (torch.empty(2, 0).long(), torch.full((2, 3), -1)):
        out = call(layer, random_rows(2, 64, torch.bfloat16), slots, torch.ones(slots.shape))
        assert torch.equal(out, torch.zeros(2, 64))


def test_an_expert_twice_in_a_row_counts_twice() -> None:
    experts = gated_experts(4, 64, 32, torch.float32)
    layer = LayerKernels(experts, kernel="tiled")
    rows = random_rows(2, 64, torch.float32)
    slots, weights = torch.tensor([[1, 1, 1], [3, 0, 3]]), torch.tensor([[0.5, 0.25, 1.0], [1.0, 2.0, 0.5]])
    truth = reference(experts, rows, slots, weights).float()
    torch.testing.assert_close(call(layer, rows, slots, weights), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [-2, 4, 2**40])
@pytest.mark.parametrize("kernel", ["tiled", "grouped"])
def test_a_slot_that_does_not_exist_is_refused_and_nothing_is_written(bad: int, kernel: str) -> None:
    layer = LayerKernels(gated_experts(4, 64, 32, torch.bfloat16), kernel=kernel)  # type: ignore[arg-type]
    out = torch.full((3, 64), 7.0)
    slots = torch.tensor([[0, 1], [2, bad], [3, 3]])
    with pytest.raises(IndexError):
        layer(KernelInput(random_rows(3, 64, torch.bfloat16), slots, torch.ones(3, 2), out))
    assert torch.equal(out, torch.full((3, 64), 7.0))


def test_strided_inputs() -> None:
    layer = LayerKernels(gated_experts(4, 64, 32, torch.bfloat16))
    rows = random_rows(6, 128, torch.bfloat16)
    slots, weights = routes(6, 4, 4)
    strided = [each[::2, ::2] for each in (rows, slots, weights)]
    assert torch.equal(call(layer, *strided), call(layer, *(each.contiguous() for each in strided)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": torch.zeros(3, 63).bfloat16()}, {"out": torch.zeros(2, 64)}, {"weights": torch.zeros(3, 1)},
        {"rows": torch.zeros(3, 64)}, {"slots": torch.zeros(3, 2).int()}, {"weights": torch.zeros(3, 2).double()},
        {"out": torch.zeros(3, 64).bfloat16()},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(wrong: dict[str, torch.Tensor]) -> None:
    layer: Any = LayerKernels(gated_experts(4, 64, 32, torch.bfloat16))
    right: dict[str, Any] = {
        "rows": torch.zeros(3, 64).bfloat16(),
        "slots": torch.zeros(3, 2).long(),
        "weights": torch.zeros(3, 2),
        "out": torch.zeros(3, 64),
    }
    layer(KernelInput(**right))
    with pytest.raises(ValueError, match=r"expected|dtypes"):
        layer(KernelInput(**(right | wrong)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_not_hidden(dtype: torch.dtype, bad: float) -> None:
    experts = gated_experts(4, 96, 40, dtype)
    rows = random_rows(3, 96, dtype)
    slots, weights = routes(3, 2, 4)
    layer = LayerKernels(experts, kernel="tiled")
    clean = call(layer, rows, slots, weights)
    spoiled = rows.clone()
    spoiled[1, 50] = bad
    out = call(layer, spoiled, slots, weights)
    assert not out[1].isfinite().any()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    weights[2, 0] = bad
    out = call(layer, rows, slots, weights)
    assert not out[2].isfinite().any()
    assert torch.equal(out[:2], clean[:2])
    weights[2, 0] = 1.0
    experts.down_proj[slots[0, 0], 5, 7] = bad
    assert not call(layer, rows, slots, weights)[0, 5].isfinite()
