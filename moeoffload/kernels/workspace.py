"""Working memory of kernels, made once per class of call and shared by all layers that one thread runs."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from moeoffload.kernels.calls import ExpertsCall

SMALL_ROWS: Final = 16
"""Calls of at most this many rows are decode- or verify-shaped."""


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


@dataclass(slots=True, eq=False)
class Arena:
    """Buffers of one class of call, by their names in `ExpertsCall`, and the call structure that points to them."""

    call: ExpertsCall = field(default_factory=ExpertsCall)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    # The most rows and routes for which the buffers are large enough, by layer shape.
    fits: dict[LayerShape, tuple[int, int]] = field(default_factory=dict)
    n_created: int = 0
    byte_s: float = 1e-10
    """Moving average over the slices of any layer: seconds per byte of weights read."""
    address: int = field(init=False)
    """Address of ``call``."""

    def __post_init__(self) -> None:
        self.address = ctypes.addressof(self.call)

    def reserve(self, shape: LayerShape, n_rows: int, n_routes: int) -> None:
        """Makes the buffers large enough for a call of ``n_rows`` rows with ``n_routes`` routes."""
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
        most_rows, most_routes = self.fits.get(shape, (0, 0))
        self.fits[shape] = max(n_rows, most_rows), max(n_routes, most_routes)

    def most_threads(self, shape: LayerShape) -> int:
        """Returns the number of threads for which there is scratch memory."""
        return self.buffers["scratch"].numel() // shape.scratch_bytes if shape.scratch_bytes else sys.maxsize

    def values(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Returns the beginning of the projections' output buffer as a matrix of the given shape and dtype."""
        n_bytes = shape[0] * shape[1] * dtype.itemsize
        return self.buffers["values"][:n_bytes].view(dtype).view(shape)


class KernelWorkspace:
    """The arenas of one thread: one for decode- and verify-shaped calls, one for prefill-shaped ones.

    Any number of layers may share a workspace, but their calls must not overlap. Buffers grow with the largest call or
    `LayerKernels.reserve` and never shrink.
    """

    def __init__(self) -> None:
        self._small = Arena()
        self._large = Arena()

    @property
    def n_created(self) -> int:
        """Number of buffers made so far."""
        return self._small.n_created + self._large.n_created

    @property
    def n_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for arena in (self._small, self._large) for buffer in arena.buffers.values())

    def arena(self, shape: LayerShape, n_rows: int, top_k: int) -> Arena:
        """Returns the arena for a call, large enough for it."""
        is_small = n_rows <= SMALL_ROWS
        arena = self._small if is_small else self._large
        most_rows, most_routes = arena.fits.get(shape, (-1, -1))
        if most_rows < n_rows or most_routes < n_rows * top_k:
            rows = SMALL_ROWS if is_small else n_rows
            arena.reserve(shape, rows, rows * top_k)
        return arena
