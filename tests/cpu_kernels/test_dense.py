"""Linear layers at few rows: torch's results but for the order of summation, in models that stay whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from moeoffload import native
from moeoffload.kernels.dense import MAX_ROWS, FewRowLinear, accelerate_linears, product_if_few
from moeoffload.native import Features

from .experts import DTYPES, EPSILON, few_row_linear, instruction_sets, threads


def _linear(n_in: int, n_out: int, dtype: torch.dtype, *, bias: bool) -> nn.Linear:
    torch.manual_seed(n_in + n_out)
    return nn.Linear(n_in, n_out, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("features", instruction_sets(), ids=str)
@pytest.mark.parametrize("shape", [(64, 32), (2048, 96), (130, 77), (7, 5), (1, 1), (4096, 4)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_is_exact_but_for_one_rounding(
    dtype: torch.dtype, bias: bool, shape: tuple[int, int], features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "cpu_features", lambda: features)
    linear = _linear(*shape, dtype, bias=bias)
    for n_rows in (1, 2, 3, 6, 7, MAX_ROWS):
        x = torch.randn(n_rows, shape[0]).to(dtype)
        truth = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
        ours = few_row_linear(x, linear.weight, linear.bias)
        assert ours.dtype == dtype
        assert ((ours - truth).abs() <= EPSILON[dtype] * truth.abs() + 2**-19).all()
        for row in range(n_rows):
            assert torch.equal(few_row_linear(x[row], linear.weight, linear.bias), ours[row])
        x[-1, -1] = torch.nan if n_rows % 2 else torch.inf
        spoilt = few_row_linear(x, linear.weight, linear.bias)
        assert not spoilt[-1].isfinite().any()
        assert torch.equal(spoilt[:-1], ours[:-1])


def test_shapes_of_the_input_are_kept() -> None:
    linear = _linear(64, 32, torch.bfloat16, bias=True)
    for shape in ((64,), (1, 64), (1, 1, 64), (2, 3, 64), (0, 64), (2, 0, 64)):
        assert few_row_linear(torch.zeros(shape).bfloat16(), linear.weight, linear.bias).shape == (*shape[:-1], 32)
    x = torch.randn(4, 3, 64).bfloat16().transpose(0, 1)
    assert torch.equal(few_row_linear(x, linear.weight), few_row_linear(x.contiguous(), linear.weight))


def test_what_does_not_fit_is_left_to_torch() -> None:
    weight = torch.zeros(32, 64).bfloat16()
    for x in (torch.zeros(MAX_ROWS + 1, 64).bfloat16(), torch.zeros(1, 32).bfloat16(), torch.zeros(1, 64)):
        assert product_if_few(x, weight) is None


@pytest.mark.parametrize("n_out", [1030, 1040])
@pytest.mark.parametrize("n_rows", [1, 3, MAX_ROWS])
def test_two_threads_give_the_same_bits(n_rows: int, n_out: int) -> None:
    linear = _linear(1024, n_out, torch.bfloat16, bias=True)
    x = torch.randn(n_rows, 1024).bfloat16()
    alone = few_row_linear(x, linear.weight, linear.bias)
    with threads(2):
        assert all(torch.equal(few_row_linear(x, linear.weight, linear.bias), alone) for _ in range(20))


def test_hooks_are_called_and_gradients_many_rows_and_other_dtypes_go_to_torch() -> None:
    linear = nn.Linear(64, 32, dtype=torch.bfloat16)
    accelerate_linears(linear)
    assert type(linear) is FewRowLinear
    assert list(linear.state_dict()) == ["weight", "bias"]
    x = torch.randn(MAX_ROWS + 1, 64).bfloat16()
    seen = []
    linear.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    out = linear(x[:1])
    assert seen == [(1, 32)]
    assert out.requires_grad
    out.sum().backward()
    assert linear.weight.grad is not None
    with torch.no_grad():
        assert torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))
        with pytest.raises(RuntimeError):
            linear(x[:1].float())
        twin = copy.deepcopy(linear)
        for parameter in twin.parameters():
            parameter.zero_()
        assert not twin(x[:1]).any()
