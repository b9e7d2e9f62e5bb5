"""Tensors over the buffers of one slot, kept by row count so that decode steps make none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

import torch

from moeoffload.errors import ServerError
from moeoffload.wire.layout import DispatchViews, FrameLayout

# Decode and verify steps repeat a few small row counts for ever; prefill brings large ones of any number.
SMALL_ROWS: Final = 16
MAX_LARGE: Final = 32
_T = TypeVar("_T")


class ByRows(Generic[_T]):
    """What is made over a buffer for each row count: small counts are kept for good, of the large ones the latest."""

    def __init__(self, make: Callable[[memoryview, int], _T], buffer: memoryview) -> None:
        self._make = make
        self._buffer = buffer
        self.small: dict[int, _T] = {}
        """Those that were made, of up to SMALL_ROWS rows."""
        self._large: dict[int, _T] = {}
        self.n_created = 0

    def get(self, rows: int) -> _T:
        """The one for ``rows`` rows; made now, or before.

        Raises:
            ServerError: the buffer was dropped, by another thread.
        """
        kept = self.small if rows <= SMALL_ROWS else self._large
        view = kept.get(rows)
        if view is None:
            if kept is self._large and len(kept) >= MAX_LARGE:
                del kept[next(iter(kept))]
            # A view made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                view = kept[rows] = self._make(_there(self._buffer), rows)
            self.n_created += 1
            if not self._buffer:  # dropped while it was made: nobody would drop this one
                kept.clear()
                _there(self._buffer)
        return view

    def drop(self) -> None:
        """Lets go of the buffer and of all that was made over it."""
        self._buffer = memoryview(b"")
        self.small.clear()
        self._large.clear()


class SlotViews:
    """Views on one slot's request and reply buffers."""

    def __init__(self, layout: FrameLayout, request: memoryview, reply: memoryview) -> None:
        self._dispatch = ByRows(layout.dispatch_views, request)
        self._combine = ByRows(layout.combine_view, reply)

    @property
    def n_created(self) -> int:
        """How often a view had to be made."""
        return self._dispatch.n_created + self._combine.n_created

    def dispatch(self, rows: int) -> DispatchViews:
        """Views on a dispatch body of ``rows`` rows in the request buffer.

        Raises:
            ServerError: the buffers were dropped, by another thread.
        """
        view = self._dispatch.small.get(rows)
        return self._dispatch.get(rows) if view is None else view

    def combine(self, rows: int) -> torch.Tensor:
        """View (rows, hidden) on a combine body in the reply buffer; raises as `dispatch` does."""
        view = self._combine.small.get(rows)
        return self._combine.get(rows) if view is None else view

    def drop(self) -> None:
        """Lets go of the buffers, so that their memory can be unmapped. From any thread."""
        self._dispatch.drop()
        self._combine.drop()


def _there(buffer: memoryview) -> memoryview:
    if not buffer:
        raise ServerError("its channel was closed meanwhile")
    return buffer
