"""Tensors over the buffers of one slot, kept by row count so that decode steps make none."""

from __future__ import annotations

from typing import Final

import torch

from moeoffload.wire.layout import DispatchViews, FrameLayout

# Decode and verify steps repeat a few small row counts for ever; prefill brings a few large ones.
MAX_KEPT: Final = 64


class SlotViews:
    """Views on one slot's request and reply buffers. ``n_created`` counts how often one had to be made."""

    def __init__(self, layout: FrameLayout, request: memoryview, reply: memoryview) -> None:
        self._layout = layout
        self._request = request
        self._reply = reply
        self._dispatch: dict[int, DispatchViews] = {}
        self._combine: dict[int, torch.Tensor] = {}
        self.n_created = 0

    def dispatch(self, rows: int) -> DispatchViews:
        """Views on a dispatch body of ``rows`` rows in the request buffer."""
        views = self._dispatch.get(rows)
        if views is None:
            if len(self._dispatch) >= MAX_KEPT:
                self._dispatch.clear()
            views = self._dispatch[rows] = self._layout.dispatch_views(self._request, rows)
            self.n_created += 1
        return views

    def combine(self, rows: int) -> torch.Tensor:
        """View (rows, hidden) on a combine body in the reply buffer."""
        view = self._combine.get(rows)
        if view is None:
            if len(self._combine) >= MAX_KEPT:
                self._combine.clear()
            view = self._combine[rows] = self._layout.combine_view(self._reply, rows)
            self.n_created += 1
        return view

    def drop(self) -> None:
        """Lets go of the buffers, so that their memory can be unmapped."""
        self._dispatch.clear()
        self._combine.clear()
        self._request = self._reply = memoryview(b"")
