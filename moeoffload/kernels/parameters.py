"""Weights outside of linear layers, such as routers: ``functional.linear`` with them becomes `product_if_few`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from moeoffload.kernels.dense import product_if_few

_BIAS_TYPES: Final = (type(None), torch.Tensor, nn.Parameter)


class FewRowParameter(nn.Parameter):
    """A parameter that differs from others only where ``torch.nn.functional.linear`` is asked for few rows."""

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for every function of such a parameter; results are ordinary tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.nn.functional.linear and not kwargs and _is_plain(*args):
                out = product_if_few(*args)
                if out is not None:
                    return out
            return func(*args, **(kwargs or {}))


def _is_plain(x: Any, weight: Any, bias: Any = None) -> bool:
    """Whether the parameter is the weight, and no other subclass of tensors is concerned."""
    return (
        type(weight) is FewRowParameter and type(x) is torch.Tensor and type(bias) in _BIAS_TYPES and weight.ndim == 2
    )


def accelerate_parameters(model: nn.Module) -> None:
    """Lets ``torch.nn.functional.linear`` read a model's other matrices at memory speed in calls of few rows.

    Changes the class of parameters (out, in) on the CPU in bfloat16 or float16 that belong to modules other than linear
    layers and embeddings, above all routers. They stay the same objects, in the same places.
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
