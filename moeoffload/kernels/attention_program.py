"""The compiled attention program: cuts its call block's work into heads of keys, which threads claim."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from moeoffload.kernels import attention_words as words
from moeoffload.kernels.attention_rows import mask_bytes_of
from moeoffload.kernels.attention_steps import KEY_BLOCK, attend, padded_dim, write_quotient
from moeoffload.kernels.phases import view
from moeoffload.kernels.program import Program
from moeoffload.kernels.vector_ir import claim, narrow, widen


def _make_attention_entry(value_type: Any, row_type: Any, stamp: int) -> Callable[[int], None]:
    value_bytes = np.dtype(value_type).itemsize

    def attention_entry(address: int) -> None:
        # Closure values are part of numba's cache key, other files' contents are not.
        _ = stamp
        call = view(address, np.int64, words.CALL_WORDS)
        scale = np.float32(view(address + words.SCALE * 8, np.float64, 1)[0])
        key_heads, group, n_queries, n_keys = (
            call[words.KEY_HEADS],
            call[words.GROUP],
            call[words.N_QUERIES],
            call[words.N_KEYS],
        )
        dim, value_dim = call[words.DIM], call[words.VALUE_DIM]
        key_stride, value_stride = call[words.KEY_STRIDES + 2], call[words.VALUE_STRIDES + 2]
        mask_kind = call[words.MASK_KIND]
        mask_bytes = mask_bytes_of(mask_kind, value_bytes)
        n_rows = group * n_queries
        width = padded_dim(value_dim)

        counters = address + np.int64(words.COUNTERS * 8)
        place = call[words.SCRATCH] + claim(counters + 8 * words.COUNTER_WORDS) * call[words.SCRATCH_BYTES]
        shares = view(place, np.float32, n_rows * KEY_BLOCK)
        place += 4 * n_rows * KEY_BLOCK
        sums = view(place, np.float32, n_rows * width)
        place += 4 * n_rows * width
        best = view(place, np.float32, n_rows)
        place += 4 * n_rows
        totals = view(place, np.float32, n_rows)
        place += 4 * n_rows
        identity = view(place, np.int32, n_rows)
        place += 4 * n_rows
        place = (place + 63) // 64 * 64
        queries = view(place, row_type, n_rows * dim)

        while True:
            item = claim(counters)
            if item >= call[words.BATCH] * key_heads:
                return
            batch = item // key_heads
            key_head = item - batch * key_heads
            for row in range(n_rows):
                head = key_head * group + row // n_queries
                offset = (
                    batch * call[words.QUERY_STRIDES]
                    + head * call[words.QUERY_STRIDES + 1]
                    + row % n_queries * call[words.QUERY_STRIDES + 2]
                )
                source = view(call[words.QUERIES] + value_bytes * offset, value_type, dim)
                target = queries[row * dim : (row + 1) * dim]
                for i in range(dim):
                    target[i] = narrow(widen(source[i]), target[0])
            offset = batch * call[words.KEY_STRIDES] + key_head * call[words.KEY_STRIDES + 1]
            keys = view(call[words.KEYS] + value_bytes * offset, value_type, n_keys * key_stride)
            offset = batch * call[words.VALUE_STRIDES] + key_head * call[words.VALUE_STRIDES + 1]
            values = view(call[words.VALUES] + value_bytes * offset, value_type, n_keys * value_stride)
            offset = batch * call[words.MASK_STRIDES] + key_head * group * call[words.MASK_STRIDES + 1]
            attend(
                queries,
                group,
                n_queries,
                dim,
                keys,
                key_stride,
                values,
                value_stride,
                value_dim,
                n_keys,
                scale,
                mask_kind,
                call[words.MASK] + mask_bytes * offset,
                call[words.MASK_STRIDES + 1 : words.MASK_STRIDES + 4],
                mask_bytes,
                call[words.IS_CAUSAL] != 0,
                identity,
                shares,
                sums,
                best,
                totals,
            )
            for row in range(n_rows):
                head = key_head * group + row // n_queries
                offset = ((batch * n_queries + row % n_queries) * key_heads * group + head) * value_dim
                out = view(call[words.OUT] + value_bytes * offset, value_type, value_dim)
                write_quotient(sums[row * width : (row + 1) * width], totals[row], out)

    return attention_entry


@functools.cache
def attention_program(dtype: torch.dtype) -> Program:
    """The attention program for a dtype of queries, keys and values; compiled, or loaded, when first asked for."""
    return Program(_make_attention_entry, dtype)
