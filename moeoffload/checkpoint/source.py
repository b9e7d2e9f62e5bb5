"""The source of a model's config and weights: a folder in the transformers format, or a GGUF file (`gguf`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moeoffload.checkpoint.convert import Sorted, make_recipes
from moeoffload.checkpoint.model_config import CONFIG_FILE, config_of, read_config, refuse_empty_claims
from moeoffload.checkpoint.tensors import TensorIndex
from moeoffload.checkpoint.weights import stored_weights


@dataclass(frozen=True)
class Source:
    """An open model; headers only.

    Attributes:
        path, folder, config, config_text: see `Checkpoint`; the first file of a GGUF in parts.
        values: the values of config.json, or of the equivalent for a GGUF file, which enter the digest.
        index: the stored tensors.
        dtype: default compute dtype; None leaves it to config and index.
        sort: finds the weights of a model on the meta device; takes the model and its experts modules by name.
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
    weights = stored_weights(index, values, folder)
    return Source(folder, folder, config, values, index, None, partial(make_recipes, weights=weights))
