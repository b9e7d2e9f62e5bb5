"""Builds a checkpoint's own multi-token-prediction layer, which predicts the token after the next one."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import local_torch_dtype

from moeoffload.checkpoint.convert import make_recipes
from moeoffload.checkpoint.layout import BUILDING, build_meta_model
from moeoffload.checkpoint.source import Source
from moeoffload.checkpoint.weights import stored_weights
from moeoffload.errors import ModelError
from moeoffload.text import first_line


def draft_head_of(source: Source, dtype: torch.dtype) -> tuple[nn.Module, Source]:
    """Returns the draft head of a model on the meta device, and ``source`` limited to its weights.

    Raises ModelError: the checkpoint has none; the message names the tensors that were looked for.
    """
    if source.folder is None or source.folder != source.path:
        raise ModelError(f"--draft own: {source.path} is a GGUF file; such a layer is read from other checkpoints only")
    main: Any = build_meta_model(source.config, dtype)
    n_layers = main.config.get_text_config().num_hidden_layers
    own = re.compile(rf"(^|\.)(mtp\.|layers\.{n_layers}\.)")
    all_weights = stored_weights(source.index, source.values, source.path)
    weights = [weight for weight in all_weights if own.search(weight.name)]
    if not weights:
        raise ModelError(
            f"--draft own: {source.path} has no multi-token-prediction layer: "
            f"neither model.layers.{n_layers}.* nor mtp.*"
        )
    with torch.device("meta"):
        head = build_head(main, dtype)
    mapping = head.get_weight_conversions(main)
    return head, replace(source, sort=partial(make_recipes, weights=weights, mapping=mapping))


def build_head(main: Any, dtype: torch.dtype) -> Any:
    """Builds transformers' one-layer `MtpModel` for ``main``, whose embedding and head it shares; weights are
    undefined.
    Raises ModelError: transformers cannot build one for this family."""
    config = main.config.get_text_config()
    # If a family's config does not state the layer's kind, it has that of the last decoder layer.
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if kinds is not None and getattr(config, f"mtp_{name}", None) is None:
            setattr(config, f"mtp_{name}", [kinds[-1]])
    if not getattr(config, "num_mtp_layers", None):
        config.num_mtp_layers = 1
    try:
        with BUILDING, local_torch_dtype(dtype):
            # Of several layers only the first drafts; later ones are trained to continue from its output.
            return MtpModel(main, num_mtp_layers=1)
    except Exception as error:  # as in `build_meta_model`
        raise ModelError(f"--draft own: transformers cannot build the layer: {first_line(error)}") from error
