"""Weights outside linear layers, such as routers: makes ``functional.linear`` with them call `product_if_few`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moeoffload.kernels.dense import product_if_few


class FewRowParameter(nn.Parameter):
    """A parameter that differs from others only in calls of ``torch.nn.functional.linear`` with few rows."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every function of such a parameter; results are ordinary tensors."""
        # `nn.Parameter`'s implementation keeps torch from dispatching here again, and returns ordinary tensors.
        own = _linear if func is torch.nn.functional.linear else func
        return super().__torch_function__(own, types, args, kwargs or {})


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = product_if_few(input, weight, bias)
    return torch.nn.functional.linear(input, weight, bias) if out is None else out


def accelerate_parameters(model: nn.Module) -> None:
    """Lets ``torch.nn.functional.linear`` read a model's other matrices at memory bandwidth in calls of few rows.

    Changes the class of parameters (out, in) on the CPU in bfloat16 or float16 that belong to modules other than linear
    layers and embeddings, above all routers. They remain the same objects, in the same modules.
    """
    others = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    for parameter in model.parameters():
        if (
            type(parameter) is nn.Parameter
            and id(parameter) not in others
            and parameter.ndim == 2
            and parameter.dtype in (torch.bfloat16, torch.float16)
            and parameter.device.type == "cpu"
        ):
            parameter.__class__ = FewRowParameter
