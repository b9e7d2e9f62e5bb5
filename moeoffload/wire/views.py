"""Tensors over the buffers of one slot, cached by row count so that decode steps create none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

import torch

from moeoffload.errors import ServerError
from moeoffload.wire.layout import DispatchViews, FrameLayout

SMALL_ROWS: Final = 16
"""Views of at most this many rows are cached: decode and verify steps repeat a few small counts, prefill's vary."""
_T = TypeVar("_T")


class _ByRows(Generic[_T]):
    """Views of one buffer; those of few rows are cached."""

    def __init__(self, make: Callable[[memoryview, int], _T], buffer: memoryview) -> None:
        self._make = make
        self._buffer = buffer
        self.kept: dict[int, _T] = {}

    def get(self, rows: int) -> _T:
        """Returns the view of ``rows`` rows. Raises ServerError: the buffer was dropped."""
        view = self.kept.get(rows)
        if view is None:
            # A view created in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                view = self._make(_check(self._buffer), rows)
            if rows <= SMALL_ROWS:
                self.kept[rows] = view
            if not self._buffer:  # dropped meanwhile by another thread: do not keep this view
                self.kept.clear()
                _check(self._buffer)
        return view

    def drop(self) -> None:
        self._buffer = memoryview(b"")
        self.kept.clear()


class SlotViews:
    """Views of one slot's request and reply buffers.

    Attributes:
        dispatch: ``dispatch(rows)`` returns the views of a dispatch body with ``rows`` rows in the request buffer.
        combine: ``combine(rows)`` returns the view (rows, columns) of a combine body in the reply buffer.

    Both raise ServerError if another thread has dropped the buffers.
    """

    def __init__(self, layout: FrameLayout, request: memoryview, reply: memoryview) -> None:
        self._dispatch: _ByRows[DispatchViews] = _ByRows(layout.dispatch_views, request)
        self._combine: _ByRows[torch.Tensor] = _ByRows(layout.combine_view, reply)
        self.dispatch = self._dispatch.get
        self.combine = self._combine.get

    @property
    def n_created(self) -> int:
        """How many views are cached."""
        return len(self._dispatch.kept) + len(self._combine.kept)

    def drop(self) -> None:
        """Drops the references to the buffers, so that their memory can be unmapped. From any thread."""
        self._dispatch.drop()
        self._combine.drop()


def _check(buffer: memoryview) -> memoryview:
    if not buffer:
        raise ServerError("its channel was closed meanwhile")
    return buffer
