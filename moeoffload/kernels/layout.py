"""Reads the layout of an experts module for the kernels from its flags and parameters, never from its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moeoffload.kernels import calls
from moeoffload.kernels.packing import Weights, dtype_of, first_tensor, why_not_dtype, why_not_packed


def hidden_of(experts: nn.Module) -> int:
    """Returns the number of elements of an expert's input and output row."""
    module: Any = experts
    down: Weights = module.down_proj
    if isinstance(down, tuple):
        return sum(part.shape[1] for part in down)
    return down.shape[-1 if module.is_transposed else -2]


def why_not(experts: nn.Module) -> str | None:
    """Returns why the C kernels cannot compute the module's projections; None if they can."""
    module: Any = experts
    up, down = up_weight(module), module.down_proj
    device = first_tensor(up).device.type
    reason = None if calls.library() is not None else "CPU kernels are not built"
    if device != "cpu":
        reason = f"device {device}"
    elif isinstance(up, tuple):
        reason = why_not_dtype(dtype_of(module)) or why_not_packed(up) or why_not_packed(down) or reason
    else:
        reason = why_not_weights(up, down) or reason
    return f"{reason}; weights are unpacked in every call" if reason and isinstance(up, tuple) else reason


def why_not_weights(up: Weights, down: Weights) -> str | None:
    """Returns why no C or Triton kernel computes plain weights of such dtypes and shapes; None if one may."""
    if isinstance(up, tuple) or isinstance(down, tuple):
        return "packed weights"
    if down.dtype != up.dtype:
        return f"dtypes {up.dtype} and {down.dtype}"
    if reason := why_not_dtype(up.dtype):
        return reason
    return f"weights of {up.dim()} dimensions" if up.dim() != 3 or down.dim() != 3 else None


def up_weight(module: Any) -> Weights:
    """Returns the weight of the first projection."""
    weight: Weights = module.gate_up_proj if module.has_gate else module.up_proj
    return weight


def rows_first(weight: torch.Tensor, module: Any) -> torch.Tensor:
    """Returns a weight of the module as (experts, out, in), detached from its gradient."""
    return weight.detach().transpose(-2, -1) if module.is_transposed else weight.detach()


def rows_in_place(module: Any, name: str) -> Weights:
    """Returns a weight of the module as (experts, out, in), contiguous; if stored (in, out) it is transposed in place.

    The parameter keeps its shape and values and changes only its strides, so other users of the module are not
    affected. Transposing needs extra memory for one matrix of one expert.
    """
    parameter = getattr(module, name)
    if isinstance(parameter, tuple):
        return parameter
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
