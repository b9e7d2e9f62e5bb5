"""The compiled program of root-mean-square norms: one pass over a row instead of six operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

import numpy as np
import torch
from numba import njit

from moeoffload.kernels.phases import view
from moeoffload.kernels.program import Program
from moeoffload.kernels.vector_ir import claim, narrow, widen


class NormKind(IntEnum):
    """What a norm does with x / rms(x), called y, and its weight w. Roundings are to the model's dtype."""

    ROUNDED = 0
    """round(w * round(y))"""
    WEIGHTED = 1
    """round(w * y)"""
    SHIFTED = 2
    """round((1 + w) * y)"""


# Words of the call block: int64 each.
ROWS: Final = 0
"""Address of (N_ROWS, DIM), contiguous."""
WEIGHT: Final = 1
"""(DIM)."""
OUT: Final = 2
"""Like the rows."""
N_ROWS: Final = 3
DIM: Final = 4
EPSILON: Final = 5
"""A float64."""
KIND: Final = 6
ITEM_ROWS: Final = 7
"""Rows that a thread claims at a time."""
COUNTER: Final = 8
"""Items claimed."""
CALL_WORDS: Final = 9

_ROUNDED, _WEIGHTED, _SHIFTED = (int(kind) for kind in NormKind)


@njit(nogil=True, fastmath={"reassoc", "nsz"})
def _sum_of_squares(row: Any) -> Any:
    """In the order that vectors like."""
    total = np.float32(0.0)
    for i in range(row.size):
        x = widen(row[i])
        total = np.float32(total + np.float32(x * x))
    return total


def _make_norm_entry(value_type: Any, row_type: Any, stamp: int) -> Callable[[int], None]:
    del row_type
    value_bytes = np.dtype(value_type).itemsize

    def norm_entry(address: int) -> None:
        # Closure values are part of numba's cache key, other files' contents are not.
        _ = stamp
        call = view(address, np.int64, CALL_WORDS)
        epsilon = np.float32(view(address + EPSILON * 8, np.float64, 1)[0])
        dim, kind = call[DIM], call[KIND]
        weight = view(call[WEIGHT], value_type, dim)
        one = np.float32(1.0)
        while True:
            first = claim(address + np.int64(COUNTER * 8)) * call[ITEM_ROWS]
            if first >= call[N_ROWS]:
                return
            for number in range(first, min(first + call[ITEM_ROWS], call[N_ROWS])):
                row = view(call[ROWS] + number * dim * value_bytes, value_type, dim)
                out = view(call[OUT] + number * dim * value_bytes, value_type, dim)
                mean = np.float32(_sum_of_squares(row) / np.float32(dim))
                factor = np.float32(one / np.sqrt(np.float32(mean + epsilon)))
                if kind == _ROUNDED:
                    for i in range(dim):
                        y = widen(narrow(np.float32(widen(row[i]) * factor), row[0]))
                        out[i] = narrow(np.float32(widen(weight[i]) * y), row[0])
                elif kind == _WEIGHTED:
                    for i in range(dim):
                        y = np.float32(widen(row[i]) * factor)
                        out[i] = narrow(np.float32(widen(weight[i]) * y), row[0])
                elif kind == _SHIFTED:
                    for i in range(dim):
                        y = np.float32(widen(row[i]) * factor)
                        out[i] = narrow(np.float32(np.float32(one + widen(weight[i])) * y), row[0])

    return norm_entry


@functools.cache
def norm_program(dtype: torch.dtype) -> Program:
    """The norm program for a dtype; compiled, or loaded from the on-disk cache, when first asked for."""
    return Program(_make_norm_entry, dtype)
