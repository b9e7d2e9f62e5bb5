"""Finds the routed experts of a model by building it once without any memory, on the meta device.

No family is named here. An experts module is one that transformers' ``use_experts_implementation`` decorated; how many
experts it has, how wide its rows are and how many experts a row visits is read from the modules themselves.
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

from moeoffload.checkpoint.model_config import first_line
from moeoffload.errors import ModelError

BUILDING = threading.Lock()
"""Held while transformers builds a model: it sets torch's default dtype, for all threads, meanwhile."""


@dataclass(frozen=True)
class ExpertLayer:
    """One MoE layer.

    Attributes:
        index: running number of the MoE layer, 0..n-1 (not the number of the decoder layer).
        module_name: the experts module in ``named_modules()`` of the transformers model.
        n_experts: routed experts.
        expert_bytes: bytes of one expert in memory: packed weights as they are, others in the compute dtype.
        n_weights: weights and biases of one expert.
        intermediate: elements of a row between the projections of an expert.
        format: of the weights (``"bf16"``, ``"fp8"``); of all that occur if they differ (``"q4_k+q6_k"``).
    """

    index: int
    module_name: str
    n_experts: int
    expert_bytes: int
    n_weights: int
    intermediate: int
    format: str


def build_meta_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """The transformers model of ``config`` on the meta device: real classes, names, shapes and dtypes, no memory.

    Text models come from AutoModelForCausalLM, configs that only AutoModelForImageTextToText knows from there.
    Raises ModelError when transformers has no such model or cannot build it.
    """
    auto = _auto_class(config)
    try:
        with BUILDING, torch.device("meta"):
            # A copy, because building a model writes to its config.
            return auto.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
    except Exception as error:  # a model class may raise anything over a config that it does not expect
        raise ModelError(
            f"transformers cannot build a {config.model_type} model from this config.json: {first_line(error)}"
        ) from error


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The routed experts modules of ``model`` by name, in model order.

    Raises ModelError when there is none: not a Mixture-of-Experts model, or one whose experts transformers does not
    route through its experts interface.
    """
    found = {name: module for name, module in model.named_modules() if is_experts_module(module)}
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


def is_experts_module(module: nn.Module) -> bool:
    """Whether ``module`` is a routed experts module, that is, decorated with ``use_experts_implementation``."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "is_transposed")


def n_experts_of(module: nn.Module) -> int:
    """How many routed experts an experts module holds."""
    return int(cast(Any, module).num_experts)


def per_expert_parameters(module: nn.Module) -> dict[str, torch.Size]:
    """Parameters of an experts module that have one entry per expert in their first dimension: name -> whole shape.

    Parameters of its submodules (a norm behind the experts) and all others are shared by the experts.
    """
    n_experts = n_experts_of(module)
    own = module.named_parameters(recurse=False)
    return {name: parameter.shape for name, parameter in own if parameter.ndim > 1 and parameter.shape[0] == n_experts}


def expert_size_of(module: nn.Module) -> dict[str, int]:
    """Elements of one expert's parameters of an experts module, by name."""
    return {name: shape[1:].numel() for name, shape in per_expert_parameters(module).items()}


def intermediate_of(module: nn.Module) -> int:
    """Elements of a row between the projections of an expert: the input width of its down projection."""
    return module.get_parameter("down_proj").shape[1 if cast(Any, module).is_transposed else 2]


def row_width_of(module: nn.Module) -> int:
    """Elements of a row that enters and leaves an expert: the output width of its down projection."""
    return module.get_parameter("down_proj").shape[2 if cast(Any, module).is_transposed else 1]


def top_k_of(model: nn.Module, experts_name: str) -> int:
    """How many experts the router beside ``experts_name`` picks for a row. Raises ModelError when it does not say."""
    block = model.get_submodule(experts_name.rpartition(".")[0])
    stated = [getattr(module, "top_k", None) for module in block.modules()]
    # A few routers keep no number of their own and look it up in the config at every call.
    config = cast(Any, model).config.get_text_config()
    stated += [getattr(config, name, None) for name in ("num_experts_per_tok", "top_k_experts")]
    for top_k in stated:
        if isinstance(top_k, int):
            return top_k
    raise ModelError(f"{_model_type(model)}: the router beside {experts_name} has no top_k; is it in config.json?")


def dense_bytes_of(model: nn.Module, experts: dict[str, nn.Module]) -> int:
    """Bytes of all parameters and buffers of ``model`` but those of single routed experts; tied weights count once."""
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
