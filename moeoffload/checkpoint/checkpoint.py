"""A checkpoint folder as hosts and expert servers see it: its MoE layers, any subset of their experts as a module."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moeoffload.checkpoint.convert import Recipe, Shapes, make_recipes
from moeoffload.checkpoint.digest import digest_checkpoint
from moeoffload.checkpoint.layout import (
    ExpertLayer,
    build_meta_model,
    dense_bytes_of,
    expert_bytes_of,
    find_experts,
    n_experts_of,
    row_width_of,
    top_k_of,
)
from moeoffload.checkpoint.locate import locate
from moeoffload.checkpoint.model_config import read_config, refuse_empty_claims
from moeoffload.checkpoint.tensors import COMPUTE_DTYPES, TensorIndex, TensorReader
from moeoffload.errors import ModelError

# Experts are converted in groups, so that beside the finished experts only a few times this many bytes are held.
_GROUP_BYTES = 16 << 20


class Checkpoint:
    """A Mixture-of-Experts model on disk. Made by :meth:`open`; holds no weights.

    Attributes:
        path: the local folder.
        config: the transformers config as ``AutoConfig`` reads it (for multimodal models the whole one).
        model_type: its ``model_type``.
        model_class: the transformers class in whose ``named_modules()`` the layers' names are found.
        dtype: compute dtype: the one given to ``open``, else the config's, else that of most stored bytes, else
            float32.
        hidden_size: elements of a row that enters and leaves a routed expert. It is the text model's ``hidden_size``
            but in the few families whose experts work on a narrower, projected row.
        top_k: routed experts per row.
        layers: the MoE layers in model order.
        dense_bytes: bytes of everything but the routed experts, in the compute dtype.
    """

    path: Path
    config: Any
    model_type: str
    model_class: type[nn.Module]
    dtype: torch.dtype
    hidden_size: int
    top_k: int
    layers: tuple[ExpertLayer, ...]
    dense_bytes: int

    def __init__(self, path: Path, config: Any, dtype: torch.dtype, index: TensorIndex):
        model = build_meta_model(config, dtype)
        experts = find_experts(model)
        self.path = path
        self.config = config
        self.model_type = config.model_type
        self.model_class = type(model)
        self.dtype = dtype
        self.hidden_size = _only({row_width_of(module) for module in experts.values()}, "row widths", self.model_type)
        self.top_k = _only({top_k_of(model, name) for name in experts}, "top_k values", self.model_type)
        self.layers = tuple(
            ExpertLayer(number, name, n_experts_of(module), expert_bytes_of(module, dtype))
            for number, (name, module) in enumerate(experts.items())
        )
        self.dense_bytes = dense_bytes_of(model, experts)
        self._index = index
        # The modules stay on the meta device and are the moulds from which subsets are cast; the rest of the model
        # goes.
        self._moulds = experts
        self._recipes = make_recipes(model, experts, index)
        self._model_config = model.config

    @classmethod
    def open(cls, model: str | Path, *, dtype: torch.dtype | None = None, revision: str | None = None) -> Checkpoint:
        """Open a folder in the transformers format or a hub id; reads headers only.

        Args:
            model: folder, or hub id such as ``"org/name"``.
            dtype: compute dtype (float32, float16, bfloat16 or float64); None takes the checkpoint's.
            revision: branch, tag or commit of a hub id.

        Raises:
            ModelError: no such model, damaged or missing files, quantised weights, not a Mixture-of-Experts model, or a
                family whose experts transformers does not route through its experts interface. One line says which.
        """
        path = locate(model, revision)
        config = read_config(path)
        index = TensorIndex.open(path)
        refuse_empty_claims(config, index)
        return cls(path, config, _compute_dtype(dtype, config, index), index)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of config, tensor names, dtypes and shapes, and a sample of every tensor's bytes.

        Equal for copies, other places and other shardings of the same checkpoint; the compute dtype does not enter.
        """
        return digest_checkpoint(self.path, self._index)

    @property
    def experts_classes(self) -> tuple[type[nn.Module], ...]:
        """The classes of the experts modules, each once."""
        return tuple(dict.fromkeys(type(mould) for mould in self._moulds.values()))

    def build_experts(self, layer: int, experts: Sequence[int], device: torch.device) -> nn.Module:
        """The model's own experts module of MoE layer ``layer`` with only ``experts``, in this order.

        Parameters have the first dimension ``len(experts)``, the compute dtype and no gradient; ``num_experts`` is
        ``len(experts)``; the module is in eval mode with a config of its own whose experts implementation is ``eager``.
        Beside the result about 150 MiB are held at most (more when a single expert is larger).

        Raises:
            ModelError: no such layer or expert, or bytes of the checkpoint that cannot be read.
        """
        if not 0 <= layer < len(self.layers):
            raise ModelError(f"layer {layer}: this model has MoE layers 0..{len(self.layers) - 1}")
        about = self.layers[layer]
        wrong = [expert for expert in experts if not 0 <= expert < about.n_experts]
        if wrong or not experts:
            asked = f"expert {wrong[0]}" if wrong else "no expert"
            raise ModelError(f"layer {layer}: {asked} was asked for, there are 0..{about.n_experts - 1}")
        with TensorReader() as reader, torch.no_grad():
            module = self._cast(about, len(experts), device)
            for recipe in self._recipes[about.module_name]:
                self._fill(module, about, recipe, experts, reader)
        return module

    def empty_experts(self, layer: int, n_experts: int, device: torch.device) -> nn.Module:
        """As `build_experts`, with room for any ``n_experts`` experts; the values of its parameters are undefined."""
        return self._cast(self.layers[layer], n_experts, device)

    def _cast(self, layer: ExpertLayer, n_experts: int, device: torch.device) -> nn.Module:
        mould = self._moulds[layer.module_name]
        module: Any = copy.deepcopy(mould)
        # Whatever this process registered as its experts implementation must not be entered again from here.
        module.config._experts_implementation = "eager"
        module.num_experts = n_experts
        shapes = Shapes("", mould, n_experts)
        for name, _ in mould.named_parameters():
            owner, _, leaf = name.rpartition(".")
            empty = torch.empty(shapes.get_parameter(f".{name}").shape, dtype=self.dtype, device=device)
            setattr(module.get_submodule(owner), leaf, nn.Parameter(empty, requires_grad=False))
        return module.eval()

    def _fill(
        self, module: nn.Module, layer: ExpertLayer, recipe: Recipe, experts: Sequence[int], reader: TensorReader
    ) -> None:
        prefix = f"{layer.module_name}."
        for group in _groups(len(experts), recipe.expert_bytes) if recipe.per_expert else [slice(0, len(experts))]:
            chosen = experts[group]
            shapes = Shapes(layer.module_name, self._moulds[layer.module_name], len(chosen))
            converted = recipe.convert(recipe.read(reader, chosen), shapes, self._model_config)
            for target, values in converted.items():
                parameter = module.get_parameter(target.removeprefix(prefix))
                (parameter[group] if recipe.per_expert else parameter).copy_(values)


def _groups(n_experts: int, expert_bytes: int) -> Iterator[slice]:
    step = max(1, _GROUP_BYTES // max(1, expert_bytes))
    for start in range(0, n_experts, step):
        yield slice(start, min(start + step, n_experts))


def _only(values: set[int], what: str, model_type: str) -> int:
    if len(values) > 1:
        raise ModelError(f"{model_type}: its MoE layers have different {what} ({sorted(values)}); not supported")
    (value,) = values
    return value


def _compute_dtype(given: torch.dtype | None, config: Any, index: TensorIndex) -> torch.dtype:
    stated = given or config.dtype or config.get_text_config().dtype or index.main_dtype() or torch.float32
    dtype = getattr(torch, stated, stated) if isinstance(stated, str) else stated
    if dtype not in COMPUTE_DTYPES:
        allowed = ", ".join(str(allowed).removeprefix("torch.") for allowed in COMPUTE_DTYPES)
        raise ModelError(f"compute dtype {dtype}: must be one of {allowed}")
    return dtype
