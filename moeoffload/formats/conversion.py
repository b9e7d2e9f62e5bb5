"""Runs conversions of stored parts with C, and records them, so that they can be repeated without Python.

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

from moeoffload.native import native_library

_Numbers: Final = ctypes.c_int64 * 6
_thread: Final = threading.local()


class Step(ctypes.Structure):
    """A call of a function of ``sections.c`` or ``transpose.c``."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("function", "source", "to")), ("numbers", _Numbers))


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion that was run; if ``is_by_rows``, it converts the first rows of ``source`` to the first of ``to``."""

    step: Step
    source: torch.Tensor
    to: torch.Tensor
    is_by_rows: bool


def convert(
    function: str, source: torch.Tensor, shape: tuple[int, int], *numbers: int, is_by_rows: bool = True
) -> torch.Tensor | None:
    """Returns what a function of C makes of a tensor, uint8 of ``shape``; None without the library.

    Args:
        function: its name.
        source: contiguous; otherwise the result is None.
        shape: rows and bytes.
        numbers: see the function; the first one is proportional to the rows if it ``is_by_rows``.
    """
    library = _library()
    if library is None or not source.is_contiguous():
        return None
    to = torch.empty(shape, dtype=torch.uint8)
    address = ctypes.cast(library[function], ctypes.c_void_p)
    step = Step(address, source.data_ptr(), to.data_ptr(), _Numbers(*numbers))
    library.moe_convert(ctypes.byref(step), 1)
    if (record := getattr(_thread, "record", None)) is not None:
        record.append(Conversion(step, source, to, is_by_rows))
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
