"""The positions of the segments in dispatch and combine frames, and views of them, cached by row count.

A dispatch body is ``rows`` (n, columns) in the payload dtype, ``weights`` (n, top_k) float32 and ``slots`` (n, top_k)
int16, back to back without padding. A combine body is ``rows`` (n, hidden). A slot is the server-local number of an
expert within its layer; -1 means that the expert is not on this server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Final, NamedTuple, NoReturn

import torch

from moeoffload.errors import ProtocolError, ServerError
from moeoffload.payload import PayloadDtype
from moeoffload.text import one_line
from moeoffload.wire.header import HEADER_BYTES, ErrorCode, FrameHeader, Kind

WEIGHT_BYTES: Final = 4
SLOT_BYTES: Final = 2
MAX_SLOTS: Final = 32_767
MAX_ROWS: Final = 4096
MAX_HIDDEN: Final = 65_536
MAX_TOP_K: Final = 512
MAX_ERROR_TEXT_BYTES: Final = 2048
MAX_FRAME_BYTES: Final = 1 << 30
KEPT: Final = 16
"""Most views of a buffer that are cached: decode and verify steps repeat a few small numbers of rows."""


class DispatchViews(NamedTuple):
    """Tensors over a dispatch body: rows (n, columns), weights (n, top_k) float32, slots (n, top_k) int16."""

    rows: torch.Tensor
    weights: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """The values that both sides agree on at attach; they determine the size of every frame.

    ``hidden`` is the model's hidden size, ``capacity`` the most rows one frame may hold.
    """

    hidden: int
    top_k: int
    dtype_out: PayloadDtype
    dtype_back: PayloadDtype
    capacity: int
    dispatch_row_bytes: int = field(init=False, compare=False)
    combine_row_bytes: int = field(init=False, compare=False)
    """Bytes of a row in a dispatch body and in a combine body, computed once since every frame needs them."""

    def __post_init__(self) -> None:
        routes = self.top_k * (WEIGHT_BYTES + SLOT_BYTES)
        object.__setattr__(self, "dispatch_row_bytes", self.dtype_out.row_bytes(self.hidden) + routes)
        object.__setattr__(self, "combine_row_bytes", self.dtype_back.row_bytes(self.hidden))
        for name, value, most in (
            ("hidden", self.hidden, MAX_HIDDEN),
            ("top_k", self.top_k, MAX_TOP_K),
            ("capacity", self.capacity, MAX_ROWS),
        ):
            if not 1 <= value <= most:
                raise ProtocolError(f"frame layout: {name} is {value}, allowed are 1 to {most}")
        if self.hidden % 2:
            raise ProtocolError(f"frame layout: hidden is {self.hidden}, expected an even number")
        if max(self.request_bytes, self.reply_bytes) > MAX_FRAME_BYTES:
            raise ProtocolError(
                f"frame layout: {self.capacity} rows make a frame of {self.request_bytes} bytes, "
                f"allowed are {MAX_FRAME_BYTES}"
            )

    @property
    def request_bytes(self) -> int:
        """Bytes of the largest request frame, header included."""
        return HEADER_BYTES + self.capacity * self.dispatch_row_bytes

    @property
    def reply_bytes(self) -> int:
        """Bytes of the largest reply frame, header included; an error frame always fits."""
        return HEADER_BYTES + max(self.capacity * self.combine_row_bytes, MAX_ERROR_TEXT_BYTES)

    def dispatch_views(self, frame: memoryview | torch.Tensor, rows: int) -> DispatchViews:
        """Returns tensors over the dispatch body in ``frame`` (which starts at the header); nothing is copied."""
        n_routes = rows * self.top_k
        weights_at = HEADER_BYTES + rows * self.dtype_out.row_bytes(self.hidden)
        slots_at = weights_at + n_routes * WEIGHT_BYTES
        return DispatchViews(
            _view(frame, self.dtype_out.torch_dtype, HEADER_BYTES, rows, self.dtype_out.columns(self.hidden)),
            _view(frame, torch.float32, weights_at, rows, self.top_k),
            _view(frame, torch.int16, slots_at, rows, self.top_k),
        )

    def combine_view(self, frame: memoryview, rows: int) -> torch.Tensor:
        """Returns a tensor (rows, columns) over the combine body in ``frame``; nothing is copied."""
        return _view(frame, self.dtype_back.torch_dtype, HEADER_BYTES, rows, self.dtype_back.columns(self.hidden))


def _view(frame: memoryview | torch.Tensor, dtype: torch.dtype, offset: int, rows: int, columns: int) -> torch.Tensor:
    if isinstance(frame, torch.Tensor):
        return frame[offset : offset + rows * columns * dtype.itemsize].view(dtype).view(rows, columns)
    with torch.inference_mode(False):  # a view created in inference mode could not be written to outside of it
        return torch.frombuffer(frame, dtype=dtype, count=rows * columns, offset=offset).view(rows, columns)


class SlotViews:
    """Views of one slot's request and reply buffers; the `KEPT` most recently used numbers of rows are cached.

    Attributes:
        dispatch: ``dispatch(rows)`` returns the views of a dispatch body with ``rows`` rows in the request buffer.
        combine: ``combine(rows)`` returns the view (rows, columns) of a combine body in the reply buffer.

    Both raise ServerError once the buffers were dropped.
    """

    def __init__(self, layout: FrameLayout, request: memoryview, reply: memoryview) -> None:
        dispatch = lru_cache(KEPT)(partial(layout.dispatch_views, request))
        combine = lru_cache(KEPT)(partial(layout.combine_view, reply))
        self.dispatch: Callable[[int], DispatchViews] = dispatch
        self.combine: Callable[[int], torch.Tensor] = combine
        self._infos = [dispatch.cache_info, combine.cache_info]

    @property
    def n_created(self) -> int:
        """Number of views made so far; 0 once they were dropped."""
        return sum(info().misses for info in self._infos)

    def drop(self) -> None:
        """Drops the references to the buffers, so that their memory can be unmapped. From any thread."""
        self.dispatch = self.combine = _dropped
        self._infos = []


def _dropped(rows: int) -> NoReturn:
    raise ServerError("its channel was closed meanwhile")


def write_error_frame(
    header: FrameHeader, frame: memoryview, request_id: int, code: ErrorCode, text: str, row: int = 0
) -> int:
    """Writes an error frame into ``frame``, with the text truncated to fit; returns its length in bytes."""
    data = text.encode(errors="replace")[: min(len(frame) - HEADER_BYTES, MAX_ERROR_TEXT_BYTES)]
    frame[HEADER_BYTES : HEADER_BYTES + len(data)] = data
    header.kind, header.request_id, header.code, header.rows = Kind.ERROR, request_id, code, row
    header.body_bytes = len(data)
    header.pack_into(frame)
    return HEADER_BYTES + len(data)


def read_error_text(frame: memoryview, body_bytes: int) -> str:
    """Returns the text of an error frame as one line; reads neither beyond the frame nor beyond the allowed length."""
    end = min(len(frame), HEADER_BYTES + min(body_bytes, MAX_ERROR_TEXT_BYTES))
    return one_line(bytes(frame[HEADER_BYTES:end]).decode(errors="replace"), MAX_ERROR_TEXT_BYTES)
