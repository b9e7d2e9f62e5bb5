"""Transposes 4-bit codes that files store as (in, out) to rows, (out, in), with the C library or else with torch.

The same thread's next call overwrites the result: allocating new memory would take longer than transposing.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, Final

import torch

from moeoffload.native import native_library

_Places = ctypes.c_int32 * 8
_kept = threading.local()
_MASKS: Final = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F))


def transpose_words(words: torch.Tensor) -> torch.Tensor:
    """Transposes (in / 8, out) int32, each word eight weights of an output row, to (out, in / 8), contiguous."""
    if (function := _function()) is None or not words.is_contiguous():
        return words.t().contiguous()
    out = _scratch(words.shape[1], words.shape[0])
    function(words.data_ptr(), *words.shape, out.data_ptr(), None)
    return out


def transpose_codes(words: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """Transposes (in, out / 8) int32, each word one weight of eight rows, the i-th row in nibble ``places[i]``, to
    (out, in / 8), contiguous, with the first weight in the lowest bits."""
    n_in, n_columns = words.shape
    if (function := _function()) is None or not words.is_contiguous():
        exchanged = _exchanged(words.unflatten(0, (-1, 8)))[:, places]  # (in / 8, 8, out / 8)
        return exchanged.permute(2, 1, 0).flatten(0, 1).contiguous()
    out = _scratch(8 * n_columns, n_in // 8)
    function(words.data_ptr(), n_in, n_columns, out.data_ptr(), _Places(*places))
    return out


def _scratch(n_rows: int, n_columns: int) -> torch.Tensor:
    room: torch.Tensor | None = getattr(_kept, "room", None)
    if room is None or room.numel() < n_rows * n_columns:
        room = _kept.room = torch.empty(n_rows * n_columns, dtype=torch.int32)
    return room[: n_rows * n_columns].view(n_rows, n_columns)


@functools.cache
def _function() -> Any:
    library = native_library()
    if library is None:
        return None
    function = library.moe_transpose_codes
    function.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)]
    function.restype = None
    return function


def _exchanged(words: torch.Tensor) -> torch.Tensor:
    """Exchanges nibble i of word k with nibble k of word i in (n, 8, m) int32, beginning with halves of words."""
    words = words.clone()
    for distance, mask in _MASKS:
        first, second = words.unflatten(1, (-1, 2, distance)).unbind(2)
        moved = (first >> 4 * distance ^ second) & mask
        second ^= moved
        first ^= moved << 4 * distance
    return words
