"""Routed experts that stay on the host, beside the dense layers."""

from __future__ import annotations

import threading
from typing import Any

import torch

from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.copy_buffers import CopyBuffers
from moeoffload.kernels import KernelInput, KernelWorkspace, LayerKernels
from moeoffload.placement import ExpertTable, slot_table


class LocalExperts:
    """Holds the experts of ``table`` on ``device`` and computes their part of a layer's sum. Thread-safe."""

    def __init__(self, checkpoint: Checkpoint, table: ExpertTable, device: torch.device) -> None:
        """Reads the experts. Raises ModelError: the checkpoint cannot be read."""
        self._threads = _Workspaces()
        with CopyBuffers() as buffers:
            how: Any = {"in_tiles": True, "buffers": buffers}
            self._layers: list[LayerKernels | None] = [
                LayerKernels(checkpoint.build_experts(layer.index, held, device, **how)) if held else None
                for layer, held in zip(checkpoint.layers, table.layers, strict=True)
            ]
        self._slot_of = [
            slot_table(held, layer.n_experts + 1).to(device, torch.int64)
            for layer, held in zip(checkpoint.layers, table.layers, strict=True)
        ]

    def compute(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> int:
        """Writes the local part of a layer's sum; returns how many rows have a local expert.

        ``hidden`` (n, hidden), ``ids`` (n, top_k) int64 expert numbers, ``weights`` (n, top_k); ``out`` (n, hidden)
        float32 is overwritten, unless the layer has no local experts.
        """
        kernels = self._layers[layer]
        if kernels is None:
            return 0
        slots = self._slot_of[layer][ids]
        n_rows = int((slots >= 0).any(dim=1).sum())
        if n_rows:
            kernels(KernelInput(hidden, slots, weights, out), self._threads.workspace)
        return n_rows


class _Workspaces(threading.local):
    """One workspace for each thread of a pipelined prefill."""

    def __init__(self) -> None:
        self.workspace = KernelWorkspace()
