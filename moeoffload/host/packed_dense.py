"""Packs the weights of the host's linear layers on a CPU: kept as they are stored, or packed to 8 or 4 bits. A packed
embedding stays packed."""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import Any, Final

import torch
from torch import nn

from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.weights import DenseTensor
from moeoffload.config import DenseFormat
from moeoffload.formats import PackedWeights
from moeoffload.formats.quantise import FORMATS, quantise
from moeoffload.host.model import load_dense_model
from moeoffload.kernels.dense import PackedEmbedding, PackedLinear

_COMPARED_ROWS: Final = 8


class _Kept:
    """A stored weight that is read once and, if stored packed, kept packed.

    For a packed weight transformers gets an uninitialised tensor in which only the rows that are compared afterwards
    have values.
    """

    def __init__(self, tensor: DenseTensor, dtype: torch.dtype) -> None:
        self._tensor = tensor
        self._dtype = dtype
        self.packed: PackedWeights | None = None

    def __getitem__(self, everything: EllipsisType) -> torch.Tensor:
        packed = self.packed = self._tensor.packed()
        if packed is None:
            return self._tensor[...]
        room = torch.empty(packed.shape[1:], dtype=self._dtype)
        for row in _compared(room):
            room[row] = packed.row(row, self._dtype)
        return room


def load_with_packed_linears(checkpoint: Checkpoint, device: torch.device, choice: DenseFormat) -> tuple[Any, str]:
    """Returns the model of `load_dense_model` with its linear layers on the CPU packed, and their formats, see
    `pack_linears`. Raises ModelError: see `load_dense_model`."""
    if device.type != "cpu":
        return load_dense_model(checkpoint, device), ""
    kept = {name: _Kept(tensor, checkpoint.dtype) for name, tensor in checkpoint.dense_tensors().items()}
    model = load_dense_model(checkpoint, device, kept)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    packed = {name: each.packed for name, each in kept.items() if each.packed is not None}
    if all(name in parameters and _is_same(each, parameters[name]) for name, each in packed.items()):
        head = model.get_output_embeddings()
        for name, each in packed.items():
            place, dtype = name.rpartition(".")[0], parameters[name].dtype
            module = model.get_submodule(place)
            is_shared = head is not None and head.weight is parameters[name]
            if type(module) is nn.Embedding and not is_shared and PackedEmbedding.fits(each, dtype):
                model.set_submodule(place, PackedEmbedding(each, dtype))
            elif type(module) is not nn.Linear:
                parameters[name].data = each.unpack(dtype)[0]
    else:  # transformers changed some weights while it loaded them
        model = load_dense_model(checkpoint, device)
    return model, pack_linears(model, checkpoint, choice, packed)


def pack_linears(
    model: nn.Module, checkpoint: Checkpoint, choice: DenseFormat, stored: Mapping[str, PackedWeights]
) -> str:
    """Replaces linear layers of ``model`` on the CPU by layers with packed weights.

    A layer with packed weights in ``stored``, which the model uses unchanged, keeps these. The others, except routers,
    are packed in the format of ``choice``; the LM head always in 8 bits.

    Returns:
        The formats, joined by ``+``; empty if nothing is packed.
    """
    blocks = {layer.module_name.rpartition(".")[0]: layer.n_experts for layer in checkpoint.layers}
    head = model.get_output_embeddings()  # type: ignore[operator]
    used = set()
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module.weight.device.type != "cpu":
            continue
        packed = stored.get(f"{name}.weight")
        if packed is not None and not _is_same(packed, module.weight):
            packed = None
        n_experts = blocks.get(name.rpartition(".")[0])
        # Beside experts: a router, or the gate of a shared expert.
        is_router = n_experts is not None and module.out_features in (n_experts, 1)
        if packed is None and choice != "keep" and not is_router:
            form = FORMATS["int8" if module is head else choice]
            packed = quantise(module.weight.detach().unsqueeze(0), form)[0]
        if packed is not None:
            used.add(packed.format.name)
            model.set_submodule(name, PackedLinear(packed, None if module.bias is None else module.bias.detach()))
    return "+".join(sorted(used))


def _is_same(packed: PackedWeights, weight: torch.Tensor) -> bool:
    """Returns whether some rows, spread over a layer's weights (out, in), equal the stored ones."""
    if packed.shape[1:] != weight.shape:
        return False
    return all(torch.equal(packed.row(row, weight.dtype), weight[row]) for row in _compared(weight))


def _compared(weight: torch.Tensor) -> list[int]:
    return torch.linspace(0, weight.shape[0] - 1, _COMPARED_ROWS).long().tolist()
