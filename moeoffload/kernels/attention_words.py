"""Words of the call block of the compiled attention program: int64 each; strides are in elements.

Heads of queries that share a head of keys and values lie together: query head = key head * GROUP + number.
"""

from __future__ import annotations

from typing import Final

QUERIES: Final = 0
"""Address of (batch, heads, n_queries, dim), last dimension contiguous; as the keys and values."""
QUERY_STRIDES: Final = 1
"""Of batch, head, query: three words."""
KEYS: Final = 4
"""(batch, key heads, n_keys, dim)."""
KEY_STRIDES: Final = 5
VALUES: Final = 8
"""(batch, key heads, n_keys, value_dim)."""
VALUE_STRIDES: Final = 9
MASK: Final = 12
"""(batch, heads, n_queries, n_keys), any strides."""
MASK_STRIDES: Final = 13
"""Of batch, head, query, key: four words."""
MASK_KIND: Final = 17
OUT: Final = 18
"""(batch, n_queries, heads, value_dim), contiguous."""
BATCH: Final = 19
KEY_HEADS: Final = 20
GROUP: Final = 21
"""Query heads per key head."""
N_QUERIES: Final = 22
N_KEYS: Final = 23
DIM: Final = 24
VALUE_DIM: Final = 25
SCALE: Final = 26
"""A float64."""
IS_CAUSAL: Final = 27
"""Query i sees the keys up to i."""
SCRATCH: Final = 28
"""Of SCRATCH_BYTES for each thread."""
SCRATCH_BYTES: Final = 29
PART_QUERIES: Final = 30
"""Of many queries: most of each head that are computed together; SCRATCH has room for so many."""
COUNTERS: Final = 32
"""One cache line each: items claimed, scratches claimed."""
COUNTER_WORDS: Final = 8
CALL_WORDS: Final = COUNTERS + 2 * COUNTER_WORDS

# Kinds of mask.
NO_MASK: Final = 0
BOOLEAN_MASK: Final = 1
"""A byte: whether the key is seen."""
ADDED_MASK: Final = 2
"""Of the queries' dtype, added to the scaled product."""
ADDED_FLOAT_MASK: Final = 3
"""float32, added to the scaled product."""
