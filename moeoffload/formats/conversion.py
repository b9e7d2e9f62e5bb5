"""Runs conversions of stored parts with C, and records them, so that they can be repeated without Python; transposes
codes, scales and zeros that files store as (in, out) to rows, (out, in).

A conversion reads one tensor and writes another. Code that calls `convert` has a way with torch as well, for machines
where the library was not built.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from moeoffload.formats.file_format import as_bytes
from moeoffload.native import native_library

_Numbers: Final = ctypes.c_int64 * 6
_thread: Final = threading.local()
IN_ORDER: Final = (0, 1, 2, 3, 4, 5, 6, 7)


class Step(ctypes.Structure):
    """A call of a function of ``sections.c`` or ``transpose.c``."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("function", "source", "to")), ("numbers", _Numbers))


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion that was run."""

    step: Step
    source: torch.Tensor
    to: torch.Tensor


def convert(function: str, source: torch.Tensor, shape: tuple[int, int], *numbers: int) -> torch.Tensor | None:
    """Returns what a function of C makes of a tensor, uint8 of ``shape``; None without the library.

    Args:
        function: its name.
        source: contiguous; otherwise the result is None.
        shape: rows and bytes.
        numbers: see the function.
    """
    library = _library()
    if library is None or not source.is_contiguous():
        return None
    to = torch.empty(shape, dtype=torch.uint8)
    address = ctypes.cast(library[function], ctypes.c_void_p)
    step = Step(address, source.data_ptr(), to.data_ptr(), _Numbers(*numbers))
    library.moe_convert(ctypes.byref(step), 1)
    if (record := getattr(_thread, "record", None)) is not None:
        record.append(Conversion(step, source, to))
    return to


@contextmanager
def recorded() -> Iterator[list[Conversion]]:
    """Yields a list to which this thread's conversions are added."""
    record: list[Conversion] = []
    _thread.record = record
    try:
        yield record
    finally:
        _thread.record = None


@functools.cache
def _library() -> Any:
    library = native_library()
    if library is not None:
        library.moe_convert.argtypes, library.moe_convert.restype = [ctypes.c_void_p, ctypes.c_int64], None
    return library


def transpose_codes(words: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """Transposes (in, out / 8) int32, each word one weight of eight rows, the i-th row in nibble ``places[i]``, to
    (out, bytes), contiguous, with the first weight in the lowest bits."""
    n_in, n_columns = words.shape
    shape, numbers = (8 * n_columns, n_in // 2), (n_in, n_columns, _nibbles(places))
    made = convert("moe_transpose_codes", words, shape, *numbers)
    if made is not None:
        return made
    codes = _split_words(words.t(), places)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def transpose_items(items: torch.Tensor) -> torch.Tensor:
    """Transposes (n, out) of any dtype of at most 8 bytes to (out, bytes), contiguous."""
    (n, n_out), size = items.shape, items.itemsize
    made = convert("moe_transpose_items", items, (n_out, n * size), n, n_out, size)
    return as_bytes(items.t()) if made is None else made


def split_zeros(words: torch.Tensor, places: tuple[int, ...] = IN_ORDER, more: int = 0) -> torch.Tensor:
    """Splits words of eight rows' zeros, (out / 8, groups) int32, contiguous or a transposed view, to (out, groups)
    uint8; ``places`` as in `transpose_codes`; ``more`` is added to each word before."""
    n, n_groups = words.shape
    stored, numbers = words if words.is_contiguous() else words.t(), (n, n_groups, *words.stride(), more)
    made = convert("moe_split_zeros", stored, (8 * n, n_groups), *numbers, _nibbles(places))
    if made is not None:
        return made
    return _split_words(words + more, places)


def _nibbles(places: tuple[int, ...]) -> int:
    return sum(place << 4 * i for i, place in enumerate(places))


def _split_words(words: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """Splits words of eight rows' codes, (n, m) int32, to (8 * n, m) uint8; row i is in nibble ``places[i]``."""
    return torch.stack([(words >> 4 * place & 15).to(torch.uint8) for place in places], dim=1).flatten(0, 1)
