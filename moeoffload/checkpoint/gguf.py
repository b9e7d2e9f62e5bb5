"""Opens a model in a GGUF file: experts come from it, config and dense tensors from it or from the vendor's folder.

``--dense DIR`` names that folder, for families whose dense tensors llama.cpp stores in changed form. Only the host has
the folder: it sends the server its config.json, without the settings of the folder's own quantisation. A config from
the network gets the same checks as one from a file: a known model_type, no absurd counts, no more layers and experts
than the GGUF holds.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from moeoffload.checkpoint.convert import Sorted, make_recipes, match_weights
from moeoffload.checkpoint.gguf_config import config_values
from moeoffload.checkpoint.gguf_file import GgufFile
from moeoffload.checkpoint.gguf_weights import dense_tensors, expert_mapping, expert_weights
from moeoffload.checkpoint.model_config import (
    CONFIG_FILE,
    MAX_CONFIG_TEXT,
    QUANTISATION_KEYS,
    config_of,
    parse_config,
    read_config,
    refuse_empty_claims,
    without_keys,
)
from moeoffload.checkpoint.source import Source
from moeoffload.checkpoint.tensors import DTYPES, TensorIndex, TensorReader
from moeoffload.checkpoint.weights import StoredWeight, as_dense, stored_weights
from moeoffload.errors import ModelError

_ROUTER: Final = re.compile(r"blk\.(\d+)\.ffn_gate_inp\.weight")


def open_gguf(path: Path, dense: Path | None, config_text: str) -> Source:
    """Opens the model in ``path`` and its other parts; reads headers only.

    Args:
        path: a GGUF file.
        dense: folder in the transformers format with the config and dense tensors; None: they come from the GGUF.
        config_text: config.json as a host sends it, used if there is no ``dense``; empty: none.

    Raises ModelError as `Checkpoint.open` does, also if ``dense`` or ``config_text`` belong to another model.
    """
    gguf = GgufFile.open(path)
    if dense is not None:
        values, where = read_config(dense), f"--dense: {dense / CONFIG_FILE}"
    elif config_text:
        values, where = parse_config(config_text), "the host's config"
    else:
        values, where = config_values(gguf), f"{path}: config in its metadata"
    config = config_of(values, where)
    index = TensorIndex(gguf.tensors)
    refuse_empty_claims(config, index)
    if dense is not None or config_text:
        _compare(gguf, config.get_text_config(), where)
    weights = stored_weights(TensorIndex.open(dense), values, dense) if dense is not None else None

    def sort(model: nn.Module, experts: dict[str, nn.Module]) -> Sorted:
        recipes, _ = make_recipes(model, experts, expert_weights(gguf, experts), expert_mapping(experts))
        if weights is not None:
            _, found = match_weights(model, experts, weights)
            _compare_routers(gguf, found, where)
            return recipes, as_dense(found)
        state = model.state_dict()
        shapes = {name: tensor.shape for name, tensor in state.items() if name.rpartition(".")[0] not in experts}
        return recipes, lambda dtype: dense_tensors(gguf, config, shapes, dtype)

    values = without_keys(values, QUANTISATION_KEYS)
    text = json.dumps(values) if dense is not None else ""
    if len(text) > MAX_CONFIG_TEXT:
        raise ModelError(f"{where}: has {len(text)} characters, the most that a server takes are {MAX_CONFIG_TEXT}")
    return Source(gguf.files[0], dense, config, values, index, _dtype_of(gguf), sort, text)


def _dtype_of(gguf: GgufFile) -> torch.dtype:
    """Returns bfloat16 for packed weights, else the dtype of the matrices; norms are float32 in every file."""
    types = {tensor.dtype for tensor in gguf.tensors if len(tensor.shape) > 1 and not _ROUTER.match(tensor.name)}
    if types <= {"F32"}:
        return torch.float32
    return torch.float16 if types <= {"F32", "F16"} else torch.bfloat16


def _compare(gguf: GgufFile, config: Any, where: str) -> None:
    """Raises ModelError if a config belongs to another model than the GGUF; shapes of experts are compared later."""
    prefix = gguf.architecture
    n_layers = gguf.metadata.get(f"{prefix}.block_count"), gguf.metadata.get(f"{prefix}.nextn_predict_layers", 0)
    if not all(type(number) is int for number in n_layers):
        raise ModelError(f"{gguf.files[0]}: its metadata has no {prefix}.block_count")
    for what, here, there in (
        ("layers", n_layers[0] - n_layers[1], getattr(config, "num_hidden_layers", None)),
        ("hidden size", gguf.metadata.get(f"{prefix}.embedding_length"), getattr(config, "hidden_size", None)),
        (
            "experts for each row",
            gguf.metadata.get(f"{prefix}.expert_used_count"),
            getattr(config, "num_experts_per_tok", None),
        ),
    ):
        # Some converters do not count the multi-token-prediction layers, or count them like other layers.
        is_same = here == there or None in (here, there) or (what == "layers" and n_layers[0] == there)
        if not is_same:
            raise ModelError(f"{where}: is of another model than {gguf.files[0].name}: {what} {there}, there {here}")


def _compare_routers(gguf: GgufFile, dense: list[StoredWeight], where: str) -> None:
    """Raises ModelError if the routers of ``dense`` are not those of the GGUF, which stores them almost unchanged."""
    stored = {match[1]: tensor for tensor in gguf.tensors if (match := _ROUTER.fullmatch(tensor.name))}
    with TensorReader() as reader:
        for layer, tensor in (*list(stored.items())[:1], *list(stored.items())[-1:]):
            alike = [each for each in dense if f".{layer}." in each.name and each.shape == tensor.shape]
            if len(alike) != 1 or tensor.dtype not in DTYPES or alike[0].packing is not None:
                continue
            mine, other = reader.read(tensor).float(), reader.read(alike[0].plain).float()
            if (mine - other).abs().max() > 0.02 * other.abs().max():
                named = f"{alike[0].name} differs from {tensor.name}"
                raise ModelError(f"{where}: is of another model than {gguf.files[0].name}: {named}")
