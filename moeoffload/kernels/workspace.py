"""Working memory of kernels, shared by all layers that one thread runs."""

from __future__ import annotations

import ctypes
import sys
from typing import Final, NamedTuple

import torch

from moeoffload.kernels.calls import ExpertsCall

_LEAST_ROWS: Final = 16
"""Rows for which there is always room: calls of a decode step make no buffers."""


class LayerShape(NamedTuple):
    """A layer's sizes that determine its workspace. ``operand_bytes`` and ``activated_bytes`` are per row."""

    n_experts: int
    hidden: int
    inter: int
    up_columns: int
    item_bytes: int
    operand_bytes: int
    activated_bytes: int
    uses_matrix_unit: bool
    scratch_bytes: int
    """Bytes per thread for unpacking weights."""


class KernelWorkspace:
    """Buffers, and the call structure that points to them.

    Any number of layers may share a workspace, but their calls must not overlap. Buffers grow with the largest call or
    `LayerKernels.reserve` and never shrink.

    Attributes:
        call, address: the call structure and its address.
        buffers: by their names in `ExpertsCall`.
        n_created: number of buffers made so far.
        byte_s: moving average over the slices of any layer: seconds per byte of weights read.
    """

    def __init__(self) -> None:
        self.call = ExpertsCall()
        self.address = ctypes.addressof(self.call)
        self.buffers: dict[str, torch.Tensor] = {}
        self.n_created = 0
        self.byte_s = 1e-10
        # The most rows and routes for which the buffers are large enough, by layer shape.
        self._fits: dict[LayerShape, tuple[int, int]] = {}

    def reserve(self, shape: LayerShape, n_rows: int, top_k: int) -> None:
        """Makes the buffers large enough for a call."""
        most_rows, most_routes = self._fits.get(shape, (0, 0))
        if n_rows <= most_rows and n_rows * top_k <= most_routes:
            return
        n_rows = max(n_rows, _LEAST_ROWS)
        n_routes = n_rows * top_k
        n_bytes = {
            "hit": shape.n_experts * 4,
            "first": (shape.n_experts + 1) * 4,
            "row_of": n_routes * 4,
            "position_of": n_routes * 4,
            "values": n_routes * max(shape.up_columns, shape.hidden) * shape.item_bytes,
            "activated": n_routes * shape.activated_bytes,
            "operands": n_rows * shape.operand_bytes,
            "packed": n_routes * max(shape.hidden, shape.inter) * shape.item_bytes * shape.uses_matrix_unit,
            "scratch": shape.scratch_bytes * torch.get_num_threads(),
        }
        for name, size in n_bytes.items():
            old = self.buffers.get(name)
            if old is None or old.numel() < size:
                self.buffers[name] = torch.empty(size, dtype=torch.uint8)
                setattr(self.call, name, self.buffers[name].data_ptr())
                self.n_created += 1
        self._fits[shape] = max(n_rows, most_rows), max(n_routes, most_routes)

    def most_threads(self, shape: LayerShape) -> int:
        """Returns the number of threads for which there is scratch memory."""
        return self.buffers["scratch"].numel() // shape.scratch_bytes if shape.scratch_bytes else sys.maxsize

    def values(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Returns the beginning of the projections' output buffer as a matrix of the given shape and dtype."""
        n_bytes = shape[0] * shape[1] * dtype.itemsize
        return self.buffers["values"][:n_bytes].view(dtype).view(shape)
