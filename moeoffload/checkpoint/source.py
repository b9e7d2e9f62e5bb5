"""The source of a model's config and weights: a folder in the transformers format, or a GGUF file (`gguf`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

import torch
from torch import nn

from moeoffload.checkpoint.convert import Recipe, make_recipes
from moeoffload.checkpoint.model_config import CONFIG_FILE, config_of, quantisation, read_config, refuse_empty_claims
from moeoffload.checkpoint.tensors import TensorIndex
from moeoffload.checkpoint.weights import DenseTensor, StoredWeight, stored_weights
from moeoffload.formats import PackedWeights


class Readable(Protocol):
    """A tensor whose values are read when they are accessed."""

    def __getitem__(self, everything: EllipsisType) -> torch.Tensor:
        """Returns the values, for ``tensor[...]``, in the compute dtype or the stored one."""

    def packed(self) -> PackedWeights | None:
        """Returns the stored matrix, (1, out, in), if it is packed and becomes the parameter without conversion."""


Dense = Callable[[torch.dtype], Mapping[str, Readable]]
"""Takes the compute dtype; returns everything but the routed experts, by names that transformers knows."""
Sorted = tuple[dict[str, list[Recipe]], Dense]
"""The recipes of the parameters of every experts module, and the dense tensors."""


@dataclass(frozen=True)
class Source:
    """An open model; headers only.

    Attributes:
        path: the folder, or the GGUF file (the first, if it has parts).
        folder: the folder with tokenizer and generation config; None if the GGUF file itself has them.
        config: the transformers config.
        values: the values of config.json, or of the equivalent for a GGUF file, which enter the digest.
        index: the stored tensors.
        dtype: default compute dtype; None leaves it to config and index.
        sort: finds the weights of a model on the meta device; takes the model and its experts modules by name.
        config_text: config.json to send to servers that have only the GGUF file, if it comes from a folder; else empty.
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
    """Opens a folder in the transformers format. Raises ModelError as `Checkpoint.open` does."""
    values = read_config(folder)
    config = config_of(values, str(folder / CONFIG_FILE))
    index = TensorIndex.open(folder)
    refuse_empty_claims(config, index)
    weights = stored_weights(index, quantisation(values, str(folder)))

    def sort(model: nn.Module, experts: dict[str, nn.Module]) -> Sorted:
        recipes, dense = make_recipes(model, experts, weights)
        return recipes, as_dense(dense)

    return Source(folder, folder, config, values, index, None, sort)


def as_dense(weights: list[StoredWeight]) -> Dense:
    """Returns the `Dense` of the stored weights of a transformers folder."""
    return lambda dtype: {weight.name: DenseTensor(weight, dtype) for weight in weights}
