"""The servers' kernels inside one process, as an experts implementation of transformers: the baseline of benchmarks."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

import torch
from torch import nn
from transformers.integrations import moe

from moeoffload.kernels import KernelInput
from moeoffload.kernels.layer import LayerKernels
from moeoffload.kernels.packing import first_tensor, up_weight
from moeoffload.kernels.workspace import KernelWorkspace

NAME: Final = "moeoffload_local"
"""Its name for ``experts_implementation``, see `register_local_experts`."""


class _Workspaces(threading.local):
    """One workspace per thread, since several threads may run layers of one model."""

    def __init__(self) -> None:
        self.mine = KernelWorkspace()


class _Prepared:
    """A module's kernels, and where the weights lay when they were prepared."""

    def __init__(self, experts: nn.Module) -> None:
        # A strong reference would keep the module, which is the key this is kept under, alive for ever.
        proxy: Any = weakref.proxy(experts)
        self.layer: LayerKernels = LayerKernels(proxy, _workspaces.mine)
        self.places = _places(experts)


_workspaces = _Workspaces()
_prepared: weakref.WeakKeyDictionary[nn.Module, _Prepared] = weakref.WeakKeyDictionary()


def _places(module: Any) -> tuple[int, int]:
    return first_tensor(up_weight(module)).data_ptr(), first_tensor(module.down_proj).data_ptr()


def local_experts(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """An experts implementation for ``transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS``.

    A layer is prepared in its first call, and again when its parameters lie elsewhere. Calls that need a gradient or
    are traced by ``torch.compile`` go to transformers' ``grouped_mm``.

    Args:
        self: the experts module.
        hidden_states: (n, hidden).
        top_k_index: (n, top_k).
        top_k_weights: (n, top_k).

    Returns:
        (n, hidden) of the dtype of ``hidden_states``.
    """
    module: Any = self
    if torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and (hidden_states.requires_grad or first_tensor(module.down_proj).requires_grad)
    ):
        return moe.grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    prepared = _prepared.get(self)
    if prepared is None or prepared.places != _places(module):
        prepared = _prepared[self] = _Prepared(self)
    layer = prepared.layer
    slots = top_k_index.long()
    if module._is_expert_parallel:
        # There, an id above the last means "elsewhere".
        slots = slots.masked_fill(slots >= layer.n_experts, -1)
    weights = top_k_weights if top_k_weights.dtype == layer.dtype else top_k_weights.float()
    out = torch.empty(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    layer(KernelInput(hidden_states.to(layer.dtype), slots, weights, out), _workspaces.mine)
    return out.to(hidden_states.dtype)


def register_local_experts() -> str:
    """Registers `local_experts` with transformers; returns the name to give as ``experts_implementation``."""
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, local_experts)
    return NAME
