"""Finds the routed experts of a model by building it once on the meta device, which needs no memory.

Nothing here depends on the family. An experts module is one whose class transformers' ``use_experts_implementation``
decorated; the number of experts, the width of rows and top-k are read from the modules themselves.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from moeoffload.errors import ModelError
from moeoffload.text import first_line

BUILDING = threading.Lock()
"""Held while transformers builds a model, because it changes torch's default dtype for all threads meanwhile."""


@dataclass(frozen=True)
class ExpertLayer:
    """One MoE layer.

    Attributes:
        index: number of the MoE layer, 0..n-1 (not the number of the decoder layer).
        module_name: name of the experts module in ``named_modules()`` of the transformers model.
        n_experts: number of routed experts.
        expert_bytes: bytes of one expert in memory: packed weights as they are, others in the compute dtype.
        n_weights: number of weights and biases of one expert.
        intermediate: elements of a row between the projections of an expert.
        format: format of the weights (``"bf16"``, ``"fp8"``); all formats if they differ (``"q4_k+q6_k"``).
    """

    index: int
    module_name: str
    n_experts: int
    expert_bytes: int
    n_weights: int
    intermediate: int
    format: str


def build_meta_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """Builds the transformers model of ``config`` on the meta device: real classes, names, shapes and dtypes, no
    memory.

    Uses AutoModelForCausalLM, or AutoModelForImageTextToText for configs that only it knows.
    Raises ModelError when transformers has no such model or cannot build it.
    """
    auto = _auto_class(config)
    try:
        with BUILDING, torch.device("meta"):
            # A copy, because building a model writes to its config.
            return auto.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
    except Exception as error:  # a model class may raise anything for an unexpected config
        raise ModelError(
            f"transformers cannot build a {config.model_type} model from this config.json: {first_line(error)}"
        ) from error


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of ``model`` that ``use_experts_implementation`` decorated, by name, in model order.

    Raises ModelError when there is none: not a Mixture-of-Experts model, or one whose experts transformers does not
    route through its experts interface.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "is_transposed")
    }
    if found:
        return found
    model_type = _model_type(model)
    strangers = sorted({type(module).__name__ for module in model.modules() if "Expert" in type(module).__name__})
    if strangers:
        raise ModelError(
            f"{model_type}: its experts ({strangers[0]}) do not use transformers' experts interface "
            "(use_experts_implementation), so they cannot run on a server"
        )
    raise ModelError(f"{model_type}: not a Mixture-of-Experts model with this config: it has no routed experts")


def n_experts_of(module: nn.Module) -> int:
    """Returns the number of routed experts of an experts module."""
    return int(cast(Any, module).num_experts)


def per_expert_parameters(module: nn.Module) -> dict[str, torch.Size]:
    """Returns name and whole shape of an experts module's parameters whose first dimension is the expert.

    The experts share all other parameters, also those of submodules (a norm after the experts).
    """
    n_experts = n_experts_of(module)
    own = module.named_parameters(recurse=False)
    return {name: parameter.shape for name, parameter in own if parameter.ndim > 1 and parameter.shape[0] == n_experts}


def intermediate_of(module: nn.Module) -> int:
    """Returns the elements of a row between the projections of an expert: the input width of its down projection."""
    return module.get_parameter("down_proj").shape[1 if cast(Any, module).is_transposed else 2]


def row_width_of(module: nn.Module) -> int:
    """Returns the elements of an expert's input and output row: the output width of its down projection."""
    return module.get_parameter("down_proj").shape[2 if cast(Any, module).is_transposed else 1]


def top_k_of(model: nn.Module, experts_name: str) -> int:
    """Returns how many experts the router beside ``experts_name`` picks per row. Raises ModelError if unknown."""
    block = model.get_submodule(experts_name.rpartition(".")[0])
    stated = [getattr(module, "top_k", None) for module in block.modules()]
    # A few routers have no attribute for it and look it up in the config at every call.
    config = cast(Any, model).config.get_text_config()
    stated += [getattr(config, name, None) for name in ("num_experts_per_tok", "top_k_experts")]
    for top_k in stated:
        if isinstance(top_k, int):
            return top_k
    raise ModelError(f"{_model_type(model)}: the router beside {experts_name} has no top_k; is it in config.json?")


def dense_bytes_of(model: nn.Module, experts: dict[str, nn.Module]) -> int:
    """Returns the bytes of all parameters and buffers except those per routed expert; tied weights count once."""
    routed = {id(module.get_parameter(name)) for module in experts.values() for name in per_expert_parameters(module)}
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for key, tensor in tensors.items() if key not in routed)


def _model_type(model: nn.Module) -> str:
    return str(cast(Any, model).config.model_type)


def _auto_class(config: Any) -> Any:
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise ModelError(f"{config.model_type}: transformers has no text-generating model for this model_type")
