"""The host's linear layers on a CPU with packed weights: as they are stored, or packed in 8 or 4 bits."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from moeoffload.checkpoint import Checkpoint
from moeoffload.config import DenseFormat
from moeoffload.formats import PackedWeights
from moeoffload.formats.quantise import FORMATS, quantise
from moeoffload.kernels.packed_linear import PackedLinear

_COMPARED_ROWS: Final = 8


def pack_linears(model: nn.Module, checkpoint: Checkpoint, choice: DenseFormat) -> str:
    """Replaces linear layers of ``model``, on the CPU, by those whose weights stay packed.

    A layer whose weights are stored packed, and become the model's without a change, keeps what is stored. The others
    are packed in the format of ``choice``, but for routers; the head has 8 bits at least.

    Returns:
        the formats, joined by ``+``; empty if nothing is packed.

    Raises:
        ModelError: the checkpoint cannot be read.
    """
    stored = checkpoint.dense_tensors()
    blocks = {layer.module_name.rpartition(".")[0]: layer.n_experts for layer in checkpoint.layers}
    head = model.get_output_embeddings()  # type: ignore[operator]
    used = set()
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module.weight.device.type != "cpu":
            continue
        tensor = stored.get(f"{name}.weight")
        packed = tensor.packed() if tensor is not None else None
        if packed is not None and not _is_same(packed, module.weight):
            packed = None
        is_router = module.out_features in _router_widths(name, blocks)
        if packed is None and choice is not DenseFormat.KEEP and not is_router:
            form = FORMATS["int8" if module is head else choice.value]
            packed = quantise(module.weight.detach().unsqueeze(0), form)
        if packed is not None:
            used.add(packed.format.name)
            model.set_submodule(name, PackedLinear(packed, None if module.bias is None else module.bias.detach()))
    return "+".join(sorted(used))


def _is_same(packed: PackedWeights, weight: torch.Tensor) -> bool:
    """Whether some rows spread over a layer's weights (out, in) are those that are stored."""
    if packed.shape[1:] != weight.shape:
        return False
    rows = torch.linspace(0, weight.shape[0] - 1, _COMPARED_ROWS).long().tolist()
    return all(torch.equal(packed.row(row, weight.dtype), weight[row]) for row in rows)


def _router_widths(name: str, blocks: dict[str, int]) -> tuple[int, ...]:
    """Numbers of outputs that a router, or the gate of a shared expert, in the same block as experts has."""
    n_experts = blocks.get(name.rpartition(".")[0])
    return () if n_experts is None else (n_experts, 1)
