"""What the compiled attention program does with one head of keys and all queries that share it, in numba.

Keys come in blocks: products -> mask -> running maximum -> probabilities -> sums of values, all in float32. A block's
keys and values are read once for all queries. The blocks do not depend on how many queries or threads there are, so an
output's bits depend on its query, the keys, the values and the mask alone.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from moeoffload.kernels.attention_rows import HIDDEN, PADDING, become_shares, scale_and_mask
from moeoffload.kernels.tile import TILE_ROWS, WEIGHT_ROWS, dot_tile
from moeoffload.kernels.value_tile import VALUE_LANES, VALUE_ROWS, value_tile
from moeoffload.kernels.vector_ir import narrow, prefetch, widen

KEY_BLOCK: Final = 256
"""Keys of a block."""

# Keys whose values stay in the first-level cache while all queries pass.
_VALUE_BLOCK: Final = 64


def scratch_bytes(n_rows: int, dim: int, value_dim: int) -> int:
    """Bytes for ``n_rows`` queries. Plain Python: what is compiled when it is first called would be so in a request."""
    return n_rows * (4 * (KEY_BLOCK + dim + value_dim + VALUE_LANES + 3) + 64) + 64


@njit(nogil=True)
def padded_dim(value_dim: int) -> int:
    """Elements from one row of sums to the next."""
    return (value_dim + VALUE_LANES - 1) // VALUE_LANES * VALUE_LANES


@njit(nogil=True)
def fetch(rows: Any, stride: int, first: int, last: int, dim: int) -> None:
    """Begins to read the rows ``first`` to ``last``."""
    address, n_bytes = np.int64(rows.ctypes.data), rows.itemsize
    for row in range(first, last):
        for offset in range(0, dim * n_bytes, 64):
            prefetch(address + row * stride * n_bytes + offset)


@njit(nogil=True)
def products(
    queries: Any,
    n_rows: int,
    dim: int,
    keys: Any,
    stride: int,
    n_keys: int,
    identity: Any,
    out: Any,
    values: Any,
    value_stride: int,
    value_dim: int,
) -> None:
    """``out[row, key] = queries[row] . keys[key]``; rows of ``out`` are KEY_BLOCK apart. Meanwhile the values come."""
    n_tiles = (n_rows + TILE_ROWS - 1) // TILE_ROWS
    key = 0
    while key < n_keys:
        step = 1
        if n_keys - key < WEIGHT_ROWS:
            # Fewer than a tile are left: the last four once more, or one of them four times.
            if n_keys >= WEIGHT_ROWS:
                key = n_keys - WEIGHT_ROWS
            else:
                step = 0
        fetch(values, value_stride, key, min(key + WEIGHT_ROWS, n_keys), value_dim)
        row = 0
        for tile in range(n_tiles):
            size = (n_rows - row + n_tiles - tile - 1) // (n_tiles - tile)
            dot_tile(
                size,
                tile == 0,
                keys,
                stride,
                key,
                step,
                dim,
                key,
                queries,
                identity,
                row,
                out,
                0,
                out,
                KEY_BLOCK,
            )
            row += size
        key += WEIGHT_ROWS if step else 1


@njit(nogil=True)
def add_values(
    shares: Any,
    n_rows: int,
    values: Any,
    stride: int,
    n_keys: int,
    value_dim: int,
    sums: Any,
    keys: Any,
    key_stride: int,
    dim: int,
    keys_left: int,
) -> None:
    """``sums[row] += shares[row, key] * values[key]`` over a block's keys. Meanwhile the next block's keys come.

    ``keys``: the next block's, of which there are ``keys_left``.
    """
    width = padded_dim(value_dim)
    whole = value_dim // VALUE_LANES * VALUE_LANES
    for start in range(0, n_keys, _VALUE_BLOCK):
        count = min(_VALUE_BLOCK, n_keys - start)
        n_tiles = (n_rows + VALUE_ROWS - 1) // VALUE_ROWS
        row = 0
        for tile in range(n_tiles):
            size = (n_rows - row + n_tiles - tile - 1) // (n_tiles - tile)
            share_address = np.int64(shares.ctypes.data) + 4 * (row * KEY_BLOCK + start)
            column = 0
            while column < whole:
                two = column + 2 * VALUE_LANES <= whole
                if tile == 0:
                    first = start + count * column // whole
                    last = start + count * (column + 2 * VALUE_LANES) // whole
                    fetch(keys, key_stride, min(first, keys_left), min(last, keys_left), dim)
                value_tile(
                    size,
                    two,
                    share_address,
                    KEY_BLOCK,
                    values[start * stride + column :],
                    stride,
                    count,
                    np.int64(sums.ctypes.data) + 4 * (row * width + column),
                    width,
                )
                column += 2 * VALUE_LANES if two else VALUE_LANES
            row += size
        for row in range(n_rows):
            for column in range(whole, value_dim):
                result = sums[row * width + column]
                for key in range(start, start + count):
                    share = shares[row * KEY_BLOCK + key]
                    result = np.float32(result + np.float32(share * widen(values[key * stride + column])))
                sums[row * width + column] = result


@njit(nogil=True, error_model="numpy")
def attend(
    queries: Any,
    group: int,
    n_queries: int,
    dim: int,
    keys: Any,
    key_stride: int,
    values: Any,
    value_stride: int,
    value_dim: int,
    n_keys: int,
    scale: Any,
    mask_kind: int,
    mask: int,
    mask_strides: Any,
    mask_bytes: int,
    is_causal: bool,
    identity: Any,
    shares: Any,
    sums: Any,
    best: Any,
    totals: Any,
) -> None:
    """Attention of ``group * n_queries`` rows to one head of keys: ``sums`` and ``totals``, whose quotient it is.

    ``mask`` is the address of the mask of the first query head, ``mask_strides`` those of head, query and key.
    """
    n_rows = group * n_queries
    width = padded_dim(value_dim)
    sums[: n_rows * width] = np.float32(0.0)
    for row in range(n_rows):
        identity[row] = row
        best[row] = HIDDEN
        totals[row] = np.float32(0.0)
    for start in range(0, n_keys, KEY_BLOCK):
        count = min(KEY_BLOCK, n_keys - start)
        filled = (count + PADDING - 1) // PADDING * PADDING
        some_values = values[start * value_stride :]
        products(
            queries,
            n_rows,
            dim,
            keys[start * key_stride :],
            key_stride,
            count,
            identity,
            shares,
            some_values,
            value_stride,
            value_dim,
        )
        for row in range(n_rows):
            head = row // n_queries
            query = row - head * n_queries
            offset = head * mask_strides[0] + query * mask_strides[1] + start * mask_strides[2]
            some = shares[row * KEY_BLOCK : row * KEY_BLOCK + filled]
            scale_and_mask(
                some,
                start,
                count,
                scale,
                mask_kind,
                mask + mask_bytes * offset,
                mask_strides[2],
                values,
                query if is_causal else n_keys,
            )
            become_shares(some, row, best, totals, sums[row * width : (row + 1) * width] if start else sums[:0])
        add_values(
            shares,
            n_rows,
            some_values,
            value_stride,
            count,
            value_dim,
            sums,
            keys[(start + count) * key_stride :],
            key_stride,
            dim,
            min(KEY_BLOCK, n_keys - start - count),
        )


@njit(nogil=True, error_model="numpy")
def write_quotient(sums: Any, divisor: Any, out: Any) -> None:
    """``out = sums / divisor``, rounded; zero for a query that saw no key."""
    for i in range(out.size):
        quotient = np.float32(0.0) if divisor == np.float32(0.0) else np.float32(sums[i] / divisor)
        out[i] = narrow(quotient, out[0])
