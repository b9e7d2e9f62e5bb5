"""What happens to one row of attention's products: scaled, masked, turned into probabilities. In numba, float32."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from moeoffload.kernels import attention_words as words
from moeoffload.kernels.phases import exp, view
from moeoffload.kernels.vector_ir import bits_of, float_of, widen

PADDING: Final = 16
"""Rows are filled up to a multiple of this many keys, so that loops over them are all vectors."""

HIDDEN: Final = np.float32(-np.inf)
"""The product of a key that is not seen."""


@njit(nogil=True)
def mask_bytes_of(kind: int, value_bytes: int) -> int:
    """Bytes of an element of a mask of this kind, for queries of ``value_bytes`` an element; 0 if there is none."""
    if kind == words.BOOLEAN_MASK:
        return 1
    if kind == words.ADDED_MASK:
        return value_bytes
    return 4 if kind == words.ADDED_FLOAT_MASK else 0


@njit(nogil=True)
def scale_and_mask(
    row: Any,
    start: int,
    n_keys: int,
    scale: Any,
    kind: int,
    address: int,
    stride: int,
    like: Any,
    last: int,
) -> None:
    """Scales a row of products and hides keys from it; ``address`` is that of the mask of key ``start``.

    ``like``: an array of the dtype of an ADDED_MASK. Keys after ``last`` are hidden, and what is behind ``n_keys``.
    """
    for key in range(n_keys):
        row[key] = np.float32(row[key] * scale)
    if kind == words.BOOLEAN_MASK:
        seen = view(address, np.uint8, n_keys * stride + 1)
        for key in range(n_keys):
            row[key] = row[key] if seen[key * stride] else HIDDEN
    elif kind == words.ADDED_MASK:
        added = view(address, like.dtype, n_keys * stride + 1)
        for key in range(n_keys):
            row[key] = np.float32(row[key] + widen(added[key * stride]))
    elif kind == words.ADDED_FLOAT_MASK:
        added_float = view(address, np.float32, n_keys * stride + 1)
        for key in range(n_keys):
            row[key] = np.float32(row[key] + added_float[key * stride])
    for key in range(max(0, last + 1 - start), n_keys):
        row[key] = HIDDEN
    for key in range(n_keys, (n_keys + PADDING - 1) // PADDING * PADDING):
        row[key] = HIDDEN


@njit(nogil=True)
def greatest(row: Any) -> Any:
    """The greatest element. Of integers that sort like the floats: their maximum can be computed in vectors."""
    best = np.int32(-0x7F800001)
    for i in range(row.size):
        bits = bits_of(row[i])
        best = max(best, np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    return float_of(best ^ ((best >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(nogil=True, error_model="numpy")
def exponentials(row: Any, shift: Any) -> None:
    """``row = exp(row - shift)``."""
    for i in range(row.size):
        row[i] = exp(np.float32(row[i] - shift))


@njit(nogil=True, fastmath={"reassoc", "nsz"})
def total(row: Any) -> Any:
    """The sum, in the order that vectors like."""
    result = np.float32(0.0)
    for i in range(row.size):
        result = np.float32(result + row[i])
    return result


@njit(nogil=True, error_model="numpy")
def become_shares(row: Any, at: int, best: Any, totals: Any, sums: Any) -> None:
    """A row of masked products becomes probabilities, relative to the greatest product so far, ``best[at]``.

    ``totals[at]`` is the sum of probabilities so far, ``sums`` that of values; both are scaled down if the row has a
    greater product.
    """
    now = max(best[at], greatest(row))
    # A query that has seen no key so far: its probabilities are zero, not undefined.
    shift = now if now != HIDDEN else np.float32(0.0)
    exponentials(row, shift)
    if now != best[at]:
        factor = exp(np.float32(best[at] - shift))
        best[at] = now
        totals[at] = np.float32(totals[at] * factor)
        for i in range(sums.size):
            sums[i] = np.float32(sums[i] * factor)
    totals[at] = np.float32(totals[at] + total(row))
