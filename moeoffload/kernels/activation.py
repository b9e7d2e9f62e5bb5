"""Recognises the activation formula between an experts module's two projections by its results, never by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from moeoffload.kernels.packing import dtype_of, first_tensor

Function = Callable[[torch.Tensor], torch.Tensor]

FUNCTIONS: Final[dict[str, Function]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda values: functional.relu(values).square(),
}


@dataclass(frozen=True, slots=True)
class Activation:
    """``function`` is a key of FUNCTIONS, or ``clamped_swiglu``.

    Gated means ``function(gate) * up``, where gate and up are two halves or, if ``is_interleaved``, alternate.
    ``clamped_swiglu`` is that of transformers' ``GptOssExperts``: gate is clamped to at most ``limit``, up to ±
    ``limit``, then the result is ``(up + 1) * gate * sigmoid(alpha * gate)``.
    """

    function: str
    is_gated: bool
    is_interleaved: bool = False
    limit: float = 0.0
    alpha: float = 0.0


def recognise(experts: nn.Module) -> Activation | None:
    """Returns the formula whose results equal those of ``experts`` bit by bit for values of all sizes and signs.

    None if there is none.

    Compares in the dtype and on the device of the weights, so every rounding step counts. Waits for the device.
    """
    module: Any = experts
    values = _probe(dtype_of(module), first_tensor(module.down_proj).device)
    if not module.has_gate:
        for name, function in FUNCTIONS.items():
            if _same(module.act_fn, values, function(values)):
                return Activation(name, is_gated=False)
        return None
    gate, up = values.repeat_interleave(len(values)), values.repeat(len(values))
    for name, function in FUNCTIONS.items():
        if _same(module._apply_gate, torch.cat((gate, up)), function(gate) * up):
            return Activation(name, is_gated=True)
    limit, alpha = getattr(module, "limit", None), getattr(module, "alpha", None)
    if isinstance(limit, int | float) and isinstance(alpha, int | float):
        clamped = gate.clamp(max=limit)
        expected = (up.clamp(-limit, limit) + 1) * (clamped * torch.sigmoid(clamped * alpha))
        if _same(module._apply_gate, torch.stack((gate, up), dim=-1).flatten(), expected):
            return Activation("clamped_swiglu", True, True, float(limit), float(alpha))
    return None


def _probe(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns (181,) values of both signs and all sizes within the range of f16, densest where the functions bend.

    Their pairs are just so few that torch computes them in one thread: to wake others may take 10 ms for each layer.
    """
    sizes = torch.cat((torch.logspace(-14, 15, 59, base=2), torch.linspace(0.1, 12, 31)))
    return torch.cat((sizes, -sizes, torch.zeros(1))).to(device, dtype)


def _same(function: Function, values: torch.Tensor, expected: torch.Tensor) -> bool:
    try:
        found = function(values.unsqueeze(0)).squeeze(0)
    except (RuntimeError, ValueError, TypeError):
        return False  # the function takes other shapes, so it is none of the known ones
    return found.shape == expected.shape and torch.equal(found.nan_to_num(), expected.nan_to_num())
