"""The compiled attention of many queries: cuts its call block's work into heads of keys and parts of the queries, which
threads claim."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from moeoffload.kernels import attention_words as words
from moeoffload.kernels.attention_blocks import BLOCK_ROWS, attend_many, padded_width
from moeoffload.kernels.attention_rows import mask_bytes_of
from moeoffload.kernels.attention_steps import KEY_BLOCK, write_quotient
from moeoffload.kernels.phases import view
from moeoffload.kernels.program import Program
from moeoffload.kernels.vector_ir import claim


def _make_attention_entry(value_type: Any, row_type: Any, stamp: int) -> Callable[[int], None]:
    del row_type

    def attention_entry(address: int) -> None:
        _ = stamp
        call = view(address, np.int64, words.CALL_WORDS)
        scale = np.float32(view(address + words.SCALE * 8, np.float64, 1)[0])
        key_heads, group, n_queries, n_keys = (
            call[words.KEY_HEADS],
            call[words.GROUP],
            call[words.N_QUERIES],
            call[words.N_KEYS],
        )
        dim, value_dim, part = call[words.DIM], call[words.VALUE_DIM], call[words.PART_QUERIES]
        mask_kind = call[words.MASK_KIND]
        mask_bytes = mask_bytes_of(mask_kind, 2)
        n_rows = group * part
        width = padded_width(value_dim)

        counters = address + np.int64(words.COUNTERS * 8)
        place = call[words.SCRATCH] + claim(counters + 8 * words.COUNTER_WORDS) * call[words.SCRATCH_BYTES]
        place = (place + 63) // 64 * 64
        packed_keys = view(place, np.uint32, KEY_BLOCK * (dim // 2))
        place += 2 * KEY_BLOCK * dim
        packed_values = view(place, np.uint32, KEY_BLOCK // 2 * width)
        place += 2 * KEY_BLOCK * width
        products = view(place, np.float32, BLOCK_ROWS * KEY_BLOCK)
        place += 4 * BLOCK_ROWS * KEY_BLOCK
        shares = view(place, value_type, BLOCK_ROWS * KEY_BLOCK)
        place += 2 * BLOCK_ROWS * KEY_BLOCK
        sums = view(place, np.float32, n_rows * width)
        place += 4 * n_rows * width
        best = view(place, np.float32, n_rows)
        place += 4 * n_rows
        totals = view(place, np.float32, n_rows)

        n_parts = (n_queries + part - 1) // part
        while True:
            item = claim(counters)
            if item >= call[words.BATCH] * key_heads * n_parts:
                return
            # The last queries, which see most, first: who claims last has little to do.
            number = n_parts - 1 - item // (call[words.BATCH] * key_heads)
            head_of_batch = item % (call[words.BATCH] * key_heads)
            batch = head_of_batch // key_heads
            key_head = head_of_batch - batch * key_heads
            first = number * part
            count = min(part, n_queries - first)
            attend_many(
                call[words.QUERIES]
                + 2 * (batch * call[words.QUERY_STRIDES] + key_head * group * call[words.QUERY_STRIDES + 1]),
                call[words.QUERY_STRIDES + 1 : words.QUERY_STRIDES + 3],
                first,
                count,
                group,
                dim,
                call[words.KEYS] + 2 * (batch * call[words.KEY_STRIDES] + key_head * call[words.KEY_STRIDES + 1]),
                call[words.KEY_STRIDES + 2],
                call[words.VALUES] + 2 * (batch * call[words.VALUE_STRIDES] + key_head * call[words.VALUE_STRIDES + 1]),
                call[words.VALUE_STRIDES + 2],
                value_dim,
                n_keys,
                scale,
                mask_kind,
                call[words.MASK]
                + mask_bytes * (batch * call[words.MASK_STRIDES] + key_head * group * call[words.MASK_STRIDES + 1]),
                call[words.MASK_STRIDES + 1 : words.MASK_STRIDES + 4],
                mask_bytes,
                call[words.IS_CAUSAL] != 0,
                shares,
                products,
                shares,
                sums,
                best,
                totals,
                packed_keys,
                packed_values,
            )
            for row in range(group * count):
                head = key_head * group + row // count
                offset = ((batch * n_queries + first + row % count) * key_heads * group + head) * value_dim
                out = view(call[words.OUT] + 2 * offset, value_type, value_dim)
                write_quotient(sums[row * width : (row + 1) * width], totals[row], out)

    return attention_entry


@functools.cache
def attention_blocks_program() -> Program:
    """The program for bfloat16 queries, keys and values; compiled, or loaded, when first asked for."""
    return Program(_make_attention_entry, torch.bfloat16)
