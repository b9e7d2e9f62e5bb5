"""What an experts module looks like to the kernels: read from its flags and parameters, never from its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations import moe

from moeoffload.kernels import calls
from moeoffload.kernels.calls import COMPUTE_DTYPES
from moeoffload.kernels.huge_pages import prefer_huge_pages


@dataclass(frozen=True, slots=True)
class ExpertsLayout:
    """Weights of a module in the layout of the tile: (n_experts, out, in), contiguous, on the CPU."""

    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    fuses_activation: bool
    """Whether the activation is silu(gate) * up on [gate | up], which the kernels compute themselves."""


def n_experts_of(experts: nn.Module) -> int:
    """Number of experts that the module holds."""
    return up_weight(experts).shape[0]


def why_not(experts: nn.Module) -> str | None:
    """Why the module's products cannot be computed by the C kernels; None if they can."""
    module: Any = experts
    up, down = up_weight(module), module.down_proj
    if up.device.type != "cpu":
        return f"device {up.device.type}"
    return why_not_weights(up, down) or (None if calls.library() is not None else "CPU kernels are not built")


def why_not_weights(up: torch.Tensor, down: torch.Tensor) -> str | None:
    """Why no kernel of ours computes weights of such dtypes and shapes; None if one may."""
    if up.dtype not in COMPUTE_DTYPES or down.dtype != up.dtype:
        return f"dtype {up.dtype}"
    return f"weights of {up.dim()} dimensions" if up.dim() != 3 or down.dim() != 3 else None


def lay_out(experts: nn.Module) -> ExpertsLayout:
    """Reads the module; weights stored (in, out) are transposed in their own memory, once.

    The parameters keep their shapes and values, only their strides change: whatever else uses the module goes on as
    before. Beside the weights one matrix of one expert is held.
    """
    module: Any = experts
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    bias = module.has_bias
    layout = ExpertsLayout(
        up=_contiguous_rows(module, up_name),
        up_bias=getattr(module, f"{up_name}_bias").detach().contiguous() if bias else None,
        down=_contiguous_rows(module, "down_proj"),
        down_bias=module.down_proj_bias.detach().contiguous() if bias else None,
        fuses_activation=_is_gated_silu(module),
    )
    prefer_huge_pages(layout.up)
    prefer_huge_pages(layout.down)
    return layout


def up_weight(module: Any) -> torch.Tensor:
    """The weight of the first projection."""
    weight: torch.Tensor = module.gate_up_proj if module.has_gate else module.up_proj
    return weight


def rows_first(weight: torch.Tensor, module: Any) -> torch.Tensor:
    """A weight of the module as (experts, out, in), without its gradient."""
    return weight.detach().transpose(-2, -1) if module.is_transposed else weight.detach()


def _contiguous_rows(module: Any, name: str) -> torch.Tensor:
    parameter = getattr(module, name)
    weight = rows_first(parameter, module)
    if weight.is_contiguous():
        return weight
    if not parameter.is_contiguous():
        weight = weight.contiguous()
    else:
        stored = parameter.detach()
        weight = stored.view(weight.shape)
        for expert in range(weight.shape[0]):
            weight[expert].copy_(stored[expert].t().contiguous())
    parameter.data = weight.transpose(-2, -1) if module.is_transposed else weight
    return weight


def _is_gated_silu(module: Any) -> bool:
    return bool(
        module.has_gate
        and getattr(module._apply_gate, "__func__", None) is moe._default_apply_gate
        and isinstance(module.act_fn, (nn.SiLU, SiLUActivation))
    )
