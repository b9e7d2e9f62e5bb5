"""Routers' weights: linear products at memory speed, and an ordinary parameter in everything else."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from moeoffload.kernels.dense import MAX_ROWS
from moeoffload.kernels.parameters import FewRowParameter, accelerate_parameters

from .experts import few_row_linear


class Router(nn.Module):
    """As families write them."""

    def __init__(self, n_experts: int = 24, hidden: int = 64) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(n_experts, hidden).bfloat16(), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(n_experts).bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def test_few_rows_are_few_row_linear_and_many_are_torchs() -> None:
    router = Router()
    x = torch.randn(MAX_ROWS + 1, 64).bfloat16()
    plain = router(x)
    accelerate_parameters(router)
    assert type(router.weight) is FewRowParameter
    assert type(router.bias) is nn.Parameter
    assert torch.equal(router(x), plain)
    for few in (x[:1], x[0], x[:MAX_ROWS], x[:6].view(2, 3, 64), x[:0]):
        assert torch.equal(router(few), few_row_linear(few, router.weight.data, router.bias))
        assert type(router(few)) is torch.Tensor


def test_everything_else_is_that_of_a_parameter() -> None:
    router = Router()
    weight = router.weight
    x = torch.randn(3, 64).bfloat16()

    def results() -> dict[str, torch.Tensor]:
        return {
            "float": weight.float(),
            "matmul": x @ weight.T,
            "sum": weight.sum(),
            "state": router.state_dict()["weight"],
            "wide": F.linear(x.float(), weight.float()),
        }

    before = results()
    accelerate_parameters(router)
    assert router.weight is weight
    after = results()
    for name, value in after.items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, before[name])
    assert isinstance(weight, nn.Parameter)
    assert [name for name, _ in router.named_parameters()] == ["weight", "bias"]
    twin = copy.deepcopy(router)
    twin.load_state_dict({name: torch.zeros_like(value) for name, value in router.state_dict().items()})
    assert not twin(x).any()
    assert router(x).any()
    router.weight.requires_grad_()
    router(x[:1]).sum().backward()
    assert router.weight.grad is not None
    router.float()
    assert router(x.float()).dtype == torch.float32


def test_linear_layers_and_embeddings_are_left_alone() -> None:
    model = nn.ModuleList([nn.Linear(8, 8), nn.Embedding(8, 8), nn.Conv1d(8, 8, 1), nn.LayerNorm(8)])
    model[0].weight = model[1].weight  # type: ignore[assignment]
    model.bfloat16()
    accelerate_parameters(model)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
