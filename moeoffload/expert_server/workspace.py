"""Arenas for what cannot be a view: ids as the kernel wants them, rows in another dtype or on another device.

There is one arena per shape class and layout, made once. Decode-shaped calls must not resize what prefill-shaped calls
use, nor the other way round.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from moeoffload.wire import DispatchViews, FrameLayout

DECODE_ROWS: Final = 8
"""Calls of at most this many rows are decode- or verify-shaped."""


class KernelInput(NamedTuple):
    """What a kernel gets: rows (n, hidden) compute dtype, slots (n, top_k) int64, weights (n, top_k), and where its
    result goes: out (n, hidden) float32."""

    rows: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor


class Arena:
    """Buffers for up to ``max_rows`` rows on one device. ``n_created`` counts buffers and kept views made so far."""

    def __init__(self, max_rows: int, layout: FrameLayout, compute_dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._on_cpu = device.type == "cpu"
        # A frame whose rows are in the compute dtype already is used as it lies in the receive buffer.
        self._copies_rows = not (self._on_cpu and layout.dtype_out.torch_dtype == compute_dtype)
        self._rows = torch.empty(
            max_rows if self._copies_rows else 0, layout.hidden, dtype=compute_dtype, device=device
        )
        self._slots = torch.empty(max_rows, layout.top_k, dtype=torch.int64, device=device)
        self._out = torch.empty(max_rows, layout.hidden, dtype=torch.float32, device=device)
        self._weights = {
            dtype: torch.empty(max_rows, layout.top_k, dtype=dtype, device=device)
            for dtype in {torch.float32, compute_dtype}
        }
        self._kept: dict[tuple[int, torch.dtype], KernelInput] = {}
        self._compute_dtype = compute_dtype
        self.n_created = 1

    def fill(self, views: DispatchViews, n_rows: int, weights_dtype: torch.dtype) -> KernelInput:
        """Brings a received dispatch into the form kernels take.

        ``views`` are over the frame; ``weights_dtype`` is float32 or the compute dtype. Views of buffers are kept by
        row count for decode-shaped calls.
        """
        key = (n_rows, weights_dtype)
        buffers = self._kept.get(key)
        if buffers is None:
            buffers = KernelInput(
                self._rows[:n_rows], self._slots[:n_rows], self._weights[weights_dtype][:n_rows], self._out[:n_rows]
            )
            if n_rows <= DECODE_ROWS:
                self._kept[key] = buffers
                self.n_created += 1
        buffers.slots.copy_(views.slots)
        buffers.weights.copy_(views.weights)
        if not self._copies_rows:
            return KernelInput(views.rows, *buffers[1:])
        buffers.rows.copy_(views.rows)
        return buffers


class Workspace:
    """The arenas of one layout: one for decode- and verify-shaped calls, one for prefill-shaped ones."""

    def __init__(self, layout: FrameLayout, compute_dtype: torch.dtype, device: torch.device) -> None:
        self._small = Arena(min(DECODE_ROWS, layout.capacity), layout, compute_dtype, device)
        self._large = Arena(layout.capacity, layout, compute_dtype, device)

    @property
    def n_created(self) -> int:
        """Arenas and kept views made so far."""
        return self._small.n_created + self._large.n_created

    def arena(self, n_rows: int) -> Arena:
        """The arena for a call of ``n_rows`` rows."""
        return self._small if n_rows <= DECODE_ROWS else self._large
