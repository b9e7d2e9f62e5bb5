"""What the compiled attention of many queries does with one head of keys and some of its queries, in numba.

Keys come in blocks, as in `attention_steps`: products -> mask -> running maximum -> probabilities -> sums of values. A
block's keys and values are packed once for all queries, and blocks that a query's mask hides are skipped. The blocks do
not depend on where a chunk of queries begins or ends, so an output's bits depend on its query, the keys, the values and
the mask alone. Probabilities are rounded to bfloat16 for their product with the values, as torch's do; the rest is
float32.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from moeoffload.kernels import attention_words as words
from moeoffload.kernels.attention_rows import HIDDEN, PADDING, become_shares, scale_and_mask
from moeoffload.kernels.attention_steps import KEY_BLOCK
from moeoffload.kernels.packed_tile import (
    PACKED_LANES,
    PACKED_ROWS,
    PACKED_VECTORS,
    packed_products,
)
from moeoffload.kernels.phases import view
from moeoffload.kernels.vector_ir import narrow

BLOCK_ROWS: Final = 8 * PACKED_ROWS
"""Queries of one head that pass a block of keys together: their products stay in the second-level cache."""

_COLUMNS: Final = PACKED_VECTORS * PACKED_LANES

# What the queries of a block see of a block of keys.
_NOTHING: Final = 0
_SOMETHING: Final = 1
_EVERYTHING: Final = 2


def scratch_bytes(n_rows: int, dim: int, value_dim: int) -> int:
    """Bytes for ``n_rows`` queries of all heads. Plain Python, as in `attention_steps`."""
    width = -(-value_dim // PACKED_LANES) * PACKED_LANES
    packed = 2 * KEY_BLOCK * (dim + width)
    return 4 * n_rows * (width + 2) + 6 * BLOCK_ROWS * KEY_BLOCK + packed + 4 * 64


@njit(nogil=True)
def padded_width(value_dim: int) -> int:
    """Elements from one row of sums to the next."""
    return (value_dim + PACKED_LANES - 1) // PACKED_LANES * PACKED_LANES


@njit(nogil=True)
def pack_keys(keys: int, stride: int, n_keys: int, dim: int, packed: Any) -> None:
    """Keys at an address, as the packed operand: for each 64 keys (dim / 2, 64) pairs. Zero behind the last one."""
    n_pairs = dim // 2
    for first in range(0, n_keys, _COLUMNS):
        some = packed[first * n_pairs : (first + _COLUMNS) * n_pairs]
        count = min(_COLUMNS, n_keys - first)
        if count < _COLUMNS:
            some[:] = np.uint32(0)
        for key in range(count):
            pairs = view(keys + 2 * stride * (first + key), np.uint32, n_pairs)
            for pair in range(n_pairs):
                some[pair * _COLUMNS + key] = pairs[pair]


@njit(nogil=True)
def pack_values(values: int, stride: int, n_keys: int, value_dim: int, filled: int, packed: Any) -> None:
    """Values at an address, as the packed operand: for each 64 columns, or what is left of them filled up to 16,
    (filled / 2, columns) pairs. Zero behind the last key and column."""
    width = padded_width(value_dim)
    if filled > n_keys or width > value_dim:
        packed[: filled // 2 * width] = np.uint32(0)
    for first in range(0, value_dim, _COLUMNS):
        columns = min(_COLUMNS, width - first)
        count = min(_COLUMNS, value_dim - first)
        some = packed[filled // 2 * first :]
        for pair in range(n_keys // 2):
            target = some[pair * columns : pair * columns + count]
            even = view(values + 2 * (2 * pair * stride + first), np.uint16, count)
            odd = view(values + 2 * ((2 * pair + 1) * stride + first), np.uint16, count)
            for i in range(count):
                target[i] = np.uint32(even[i]) | (np.uint32(odd[i]) << np.uint32(16))
        if n_keys % 2:
            target = some[n_keys // 2 * columns : n_keys // 2 * columns + count]
            even = view(values + 2 * ((n_keys - 1) * stride + first), np.uint16, count)
            for i in range(count):
                target[i] = np.uint32(even[i])


@njit(nogil=True)
def what_is_seen(
    first: int, n_rows: int, start: int, n_keys: int, is_causal: bool, kind: int, mask: int, mask_strides: Any
) -> int:
    """What the queries from ``first`` on see of the keys from ``start`` on; ``mask`` is the address of theirs."""
    if is_causal:
        if first + n_rows <= start:
            return _NOTHING
        if first < start + n_keys - 1:
            return _SOMETHING
    if kind == words.NO_MASK:
        return _EVERYTHING
    if kind != words.BOOLEAN_MASK:
        return _SOMETHING
    stride = mask_strides[2]
    least, most = np.uint8(1), np.uint8(0)
    for row in range(n_rows):
        seen = view(mask + row * mask_strides[1], np.uint8, (n_keys - 1) * stride + 1)
        for key in range(n_keys):
            least = min(least, seen[key * stride])
            most = max(most, seen[key * stride])
    return _NOTHING if most == 0 else _EVERYTHING if least != 0 else _SOMETHING


@njit(nogil=True)
def multiply(
    n_rows: int, rows: int, row_bytes: int, packed: int, n_pairs: int, n_columns: int, out: int, out_bytes: int,
    adds: int,
) -> None:  # fmt: skip
    """All tiles of rows times a packed operand of ``n_columns`` columns, a multiple of 16."""
    for first in range(0, n_columns, _COLUMNS):
        n_vectors = min(_COLUMNS, n_columns - first) // PACKED_LANES
        columns = packed + 4 * n_pairs * first
        for row in range(0, n_rows, PACKED_ROWS):
            count = min(PACKED_ROWS, n_rows - row)
            source, target = rows + row * row_bytes, out + row * out_bytes + 4 * first
            packed_products(adds, count, n_vectors, source, row_bytes, columns, n_pairs, target, out_bytes)


@njit(nogil=True, error_model="numpy")
def attend_many(
    queries: int,
    query_strides: Any,
    first_query: int,
    n_queries: int,
    group: int,
    dim: int,
    keys: int,
    key_stride: int,
    values: int,
    value_stride: int,
    value_dim: int,
    n_keys: int,
    scale: Any,
    mask_kind: int,
    mask: int,
    mask_strides: Any,
    mask_bytes: int,
    is_causal: bool,
    like: Any,
    products: Any,
    shares: Any,
    sums: Any,
    best: Any,
    totals: Any,
    packed_keys: Any,
    packed_values: Any,
) -> None:
    """Attention of ``n_queries`` queries of each of ``group`` heads to one head of keys: ``sums`` and ``totals``.

    Addresses are those of the first of the group's heads; of queries and mask, that of query 0. Rows of ``sums``,
    ``best`` and ``totals``: head by head.
    """
    width = padded_width(value_dim)
    n_rows = group * n_queries
    sums[: n_rows * width] = np.float32(0.0)
    best[:n_rows] = HIDDEN
    totals[:n_rows] = np.float32(0.0)
    products_at, shares_at = np.int64(products.ctypes.data), np.int64(shares.ctypes.data)
    keys_at, values_at = np.int64(packed_keys.ctypes.data), np.int64(packed_values.ctypes.data)
    sums_at = np.int64(sums.ctypes.data)
    end = min(n_keys, first_query + n_queries) if is_causal else n_keys
    for start in range(0, end, KEY_BLOCK):
        count = min(KEY_BLOCK, n_keys - start)
        filled = (count + PADDING - 1) // PADDING * PADDING
        n_columns = (count + _COLUMNS - 1) // _COLUMNS * _COLUMNS
        is_packed = False
        for some in range(0, n_queries, BLOCK_ROWS):
            size = min(BLOCK_ROWS, n_queries - some)
            query = first_query + some
            seen = _NOTHING
            for head in range(group):
                mask_at = mask + mask_bytes * (
                    head * mask_strides[0] + query * mask_strides[1] + start * mask_strides[2]
                )
                if head == 0 or mask_strides[0] != 0:
                    seen = what_is_seen(query, size, start, count, is_causal, mask_kind, mask_at, mask_strides)
                if seen == _NOTHING:
                    continue
                if not is_packed:
                    is_packed = True
                    pack_keys(keys + 2 * start * key_stride, key_stride, count, dim, packed_keys)
                    pack_values(
                        values + 2 * start * value_stride, value_stride, count, value_dim, filled, packed_values
                    )
                source = queries + 2 * (head * query_strides[0] + query * query_strides[1])
                multiply(
                    size, source, 2 * query_strides[1], keys_at, dim // 2, n_columns, products_at, 4 * KEY_BLOCK, 0
                )
                first = head * n_queries + some
                for row in range(size):
                    mine = products[row * KEY_BLOCK : row * KEY_BLOCK + filled]
                    scale_and_mask(
                        mine,
                        start,
                        count,
                        scale,
                        words.NO_MASK if seen == _EVERYTHING else mask_kind,
                        mask_at + mask_bytes * row * mask_strides[1],
                        mask_strides[2],
                        like,
                        query + row if is_causal else n_keys,
                    )
                    at = first + row
                    become_shares(mine, at, best, totals, sums[at * width : (at + 1) * width] if start else sums[:0])
                    rounded = shares[row * KEY_BLOCK : row * KEY_BLOCK + filled]
                    for i in range(filled):
                        rounded[i] = narrow(mine[i], rounded[0])
                target = sums_at + 4 * first * width
                multiply(size, shares_at, 2 * KEY_BLOCK, values_at, filled // 2, width, target, 4 * width, 1)
