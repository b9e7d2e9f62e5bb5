"""Where a model's config and weights come from: a folder in the transformers format, or a GGUF file (`gguf`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

import torch
from torch import nn

from moeoffload.checkpoint.convert import Recipe, make_recipes
from moeoffload.checkpoint.model_config import CONFIG_FILE, quantisation, read_config, refuse_empty_claims
from moeoffload.checkpoint.tensors import TensorIndex, read_json
from moeoffload.checkpoint.weights import DenseTensor, StoredWeight, WeightIndex
from moeoffload.formats import PackedWeights


class Readable(Protocol):
    """A tensor whose values are read when they are asked for."""

    def __getitem__(self, everything: EllipsisType) -> torch.Tensor:
        """``tensor[...]``: the values, in the compute dtype or as they are stored."""

    def packed(self) -> PackedWeights | None:
        """The matrix as it is stored, (1, out, in), if it is packed and becomes the parameter without a change."""


Dense = Callable[[torch.dtype], Mapping[str, Readable]]
"""Compute dtype -> everything but the routed experts, by a name that transformers knows."""
Sorted = tuple[dict[str, list[Recipe]], Dense]
"""For every experts module the recipes of its parameters, and the rest."""


@dataclass(frozen=True)
class Source:
    """An open model; headers only.

    Attributes:
        path: the folder, or the GGUF file (the first, if it has parts).
        folder: where tokenizer and generation config are; None if the GGUF file itself has them.
        config: the transformers config.
        values: what decides numbers in config.json, or would if there were one.
        index: the stored tensors.
        dtype: compute dtype unless a setting says another; None leaves it to config and index.
        sort: finds the weights of a model on the meta device, whose experts modules it is given by name.
        config_text: for servers that have only the GGUF file, config.json where it is somewhere else; else empty.
    """

    path: Path
    folder: Path | None
    config: Any
    values: dict[str, Any]
    index: TensorIndex
    dtype: torch.dtype | None
    sort: Callable[[nn.Module, dict[str, nn.Module]], Sorted]
    config_text: str = ""


def open_folder(folder: Path) -> Source:
    """A folder in the transformers format. Raises ModelError as `Checkpoint.open` says."""
    config = read_config(folder)
    index = TensorIndex.open(folder)
    refuse_empty_claims(config, index)
    weights = WeightIndex.of(index, quantisation(folder))

    def sort(model: nn.Module, experts: dict[str, nn.Module]) -> Sorted:
        recipes, dense = make_recipes(model, experts, weights)
        return recipes, as_dense(dense)

    return Source(folder, folder, config, read_json(folder / CONFIG_FILE), index, None, sort)


def as_dense(weights: list[StoredWeight]) -> Dense:
    """The weights of a folder of transformers'."""
    return lambda dtype: {weight.name: DenseTensor(weight, dtype) for weight in weights}
