"""Attention on the CPU: of few queries at memory speed, of many bfloat16 ones at the speed of the CPU's products.

torch's reads keys and values of one query several times, and multiplies bfloat16 as float32 where the CPU has no matrix
unit (AMX). Few queries: products, softmax and sums are computed in float32 and rounded once at the end. Many: the
probabilities are rounded, too, before their product with the values, as torch's are.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

import torch

from moeoffload.kernels import attention_blocks, attention_steps
from moeoffload.kernels import attention_words as words
from moeoffload.kernels.attention_blocks_program import attention_blocks_program
from moeoffload.kernels.attention_program import attention_program
from moeoffload.kernels.program import COMPUTE_DTYPES, Program, threads_for
from moeoffload.kernels.vector_ir import has_bf16_dot, has_matrix_unit

FEW_QUERIES: Final = 16
"""Calls of more queries are computed by blocks of them, or by torch."""
_PART_ROWS: Final = 2048
"""About so many queries of all heads that share keys are computed together: packing those keys then takes little."""


class _Thread(threading.local):
    """A thread's call block and scratch."""

    def __init__(self) -> None:
        self.call: Any = (ctypes.c_int64 * words.CALL_WORDS)()
        self.address = ctypes.addressof(self.call)
        self.scale = ctypes.c_double.from_address(self.address + 8 * words.SCALE)
        self.scratch = torch.empty(0, dtype=torch.uint8)


_thread = _Thread()


def cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention on the CPU, without gradient.

    Args:
        query: (batch, heads, queries, dim) bfloat16, float16 or float32, any strides but last dimension contiguous; as
            the keys and values.
        key: (batch, key heads, keys, dim) of the same dtype; heads is a multiple of key heads.
        value: (batch, key heads, keys, value dim) of the same dtype.
        mask: what can be expanded to (batch, heads, queries, keys): bool (True: the key is seen), or of the query's
            dtype or float32, added to the scaled products.
        scale: of the products; default dim ** -0.5.
        is_causal: query i sees the keys up to i.

    Returns:
        (batch, queries, heads, value dim) contiguous, of the query's dtype; zero for a query that sees no key.

    Raises:
        ValueError: shapes, strides or dtypes are others, or there are more than FEW_QUERIES queries and no program for
            so many: see `fits`.
    """
    if not fits(query, key, value, mask):
        shapes = [(tuple(each.shape), each.dtype) for each in (query, key, value)]
        raise ValueError(f"query, key, value {shapes}, mask {None if mask is None else tuple(mask.shape)}")
    batch, heads, n_queries, dim = query.shape
    key_heads, n_keys, value_dim = value.shape[1:]
    dtype = query.dtype
    out = torch.empty((batch, n_queries, heads, value_dim), dtype=dtype)
    call = _thread.call
    call[words.QUERIES] = query.data_ptr()
    call[words.QUERY_STRIDES : words.QUERY_STRIDES + 3] = query.stride()[:3]
    call[words.KEYS] = key.data_ptr()
    call[words.KEY_STRIDES : words.KEY_STRIDES + 3] = key.stride()[:3]
    call[words.VALUES] = value.data_ptr()
    call[words.VALUE_STRIDES : words.VALUE_STRIDES + 3] = value.stride()[:3]
    if mask is None:
        call[words.MASK_KIND] = words.NO_MASK
    else:
        mask = mask.expand(batch, heads, n_queries, n_keys)
        call[words.MASK] = mask.data_ptr()
        call[words.MASK_STRIDES : words.MASK_STRIDES + 4] = mask.stride()
        if mask.dtype == torch.bool:
            call[words.MASK_KIND] = words.BOOLEAN_MASK
        else:
            call[words.MASK_KIND] = words.ADDED_MASK if mask.dtype == dtype else words.ADDED_FLOAT_MASK
    call[words.OUT] = out.data_ptr()
    call[words.BATCH] = batch
    call[words.KEY_HEADS] = key_heads
    call[words.GROUP] = group = heads // key_heads
    call[words.N_QUERIES] = n_queries
    call[words.N_KEYS] = n_keys
    call[words.DIM] = dim
    call[words.VALUE_DIM] = value_dim
    call[words.IS_CAUSAL] = is_causal
    _thread.scale.value = dim**-0.5 if scale is None else scale
    n_heads = batch * key_heads
    if n_queries <= FEW_QUERIES:
        n_threads = min(n_heads, threads_for(n_heads * n_keys * (dim + value_dim) * dtype.itemsize))
        scratch_bytes = attention_steps.scratch_bytes(group * n_queries, dim, value_dim)
        _run(attention_program(dtype), n_threads, scratch_bytes)
    else:
        part = min(n_queries, max(_PART_ROWS // group, attention_blocks.BLOCK_ROWS))
        call[words.PART_QUERIES] = part
        n_threads = min(n_heads * -(-n_queries // part), torch.get_num_threads())
        _run(attention_blocks_program(), n_threads, attention_blocks.scratch_bytes(group * part, dim, value_dim))
    return out


def _run(program: Program, n_threads: int, scratch_bytes: int) -> None:
    """Runs the call block of this thread, in ``n_threads`` threads with so much scratch each."""
    call = _thread.call
    if _thread.scratch.numel() < n_threads * scratch_bytes:
        _thread.scratch = torch.empty(n_threads * scratch_bytes, dtype=torch.uint8)
    call[words.SCRATCH] = _thread.scratch.data_ptr()
    call[words.SCRATCH_BYTES] = scratch_bytes
    call[words.COUNTERS] = call[words.COUNTERS + words.COUNTER_WORDS] = 0
    if n_threads <= 1:
        program.run(_thread.address)
    else:
        program.run_threaded(_thread.address, n_threads)


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether `cpu_attention` takes these."""
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        return False
    batch, heads, n_queries, dim = query.shape
    key_batch, key_heads, n_keys, key_dim = key.shape
    dtype = query.dtype
    return (
        (n_queries <= FEW_QUERIES or _many_fit(query, key, value))
        and key_batch == batch
        and key_dim == dim
        and value.shape[:3] == key.shape[:3]
        and n_keys > 0
        and heads >= key_heads > 0
        and heads % key_heads == 0
        and dtype in COMPUTE_DTYPES
        and key.dtype == dtype
        and value.dtype == dtype
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and query.device.type == key.device.type == value.device.type == "cpu"
        and (mask is None or _mask_fits(mask, (batch, heads, n_queries, n_keys), dtype))
    )


def takes_many(dtype: torch.dtype) -> bool:
    """Whether `cpu_attention` takes more than FEW_QUERIES queries of a dtype here. Where it does not, torch is fast."""
    return dtype == torch.bfloat16 and has_bf16_dot() and not has_matrix_unit()


def _many_fit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether pairs of neighbours, which are multiplied together, can be read as words."""
    return (
        takes_many(query.dtype)
        and query.shape[3] % 2 == 0
        and key.data_ptr() % 4 == 0
        and all(stride % 2 == 0 for stride in key.stride()[:3])
    )


def _mask_fits(mask: torch.Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype) -> bool:
    return (
        mask.ndim <= 4
        and mask.device.type == "cpu"
        and mask.dtype in (torch.bool, torch.float32, dtype)
        and all(mine in (1, want) for mine, want in zip(reversed(mask.shape), reversed(shape), strict=False))
    )
