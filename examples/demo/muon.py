"""The optimizer of the demo's weight matrices."""

from collections.abc import Callable

import torch
from torch import Tensor


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrices to the matrices g (..., m, n), by Newton-Schulz in bf16 (Muon)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    if tall := g.shape[-2] > g.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return (x.mT if tall else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal; for the weight matrices, experts as stacks (E, m, n) of them."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.02):
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(m, group["momentum"]))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5)
