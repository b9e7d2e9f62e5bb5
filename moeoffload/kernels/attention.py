"""Attention on the CPU: memory-bound for few queries, for many bfloat16 queries bound by the CPU's bfloat16 products.

torch's attention reads the keys and values of one query several times, and multiplies bfloat16 as float32 on a CPU
without a matrix unit (AMX). Products, softmax and sums are computed in float32 and rounded once at the end; only where
the CPU multiplies bfloat16 are its probabilities rounded, too, before their product with the values, as in torch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

import torch

from moeoffload import native
from moeoffload.kernels import calls
from moeoffload.kernels.calls import DTYPE_CODES, AttentionCall
from moeoffload.kernels.threads import parallel_address, threads_for
from moeoffload.native import Features

FEW_QUERIES: Final = 16
"""Calls with more queries are computed in blocks of queries, or by torch."""

_BOOLEAN_MASK: Final = 3
_NO_MASK: Final = 4


@dataclass(frozen=True, slots=True)
class Pages:
    """Where ``n_keys`` keys and values lie: one after the other in the pages ``numbers`` (n,) int64 on the CPU."""

    numbers: torch.Tensor
    n_keys: int


def cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    pages: Pages | None = None,
) -> torch.Tensor:
    """Computes scaled dot-product attention on the CPU, without gradient; only if the C library was built.

    Args:
        query: (batch, heads, queries, dim) bfloat16, float16 or float32; any strides, but the last dimension must be
            contiguous, also in key and value.
        key: (batch, key heads, keys, dim) of the same dtype; heads is a multiple of key heads.
        value: (batch, key heads, keys, value dim) of the same dtype.
        mask: expandable to (batch, heads, queries, keys): bool (True: the key is visible), or float32 or the query's
            dtype, added to the scaled products.
        scale: factor of the products; default dim ** -0.5.
        is_causal: query i sees keys 0 to i.
        pages: of a batch of one, where its keys and values lie; then these are (all pages, key heads, keys of a page,
            dim).

    Returns:
        (batch, queries, heads, value dim) contiguous, of the query's dtype; zero for a query that sees no key.

    Raises ValueError: `fits` is False; MemoryError: no memory for intermediate results.
    """
    if not fits(query, key, value, mask, pages):
        shapes = [(tuple(each.shape), each.dtype) for each in (query, key, value)]
        raise ValueError(f"query, key, value {shapes}, mask {None if mask is None else tuple(mask.shape)}")
    library = calls.library()
    batch, heads, n_queries, dim = query.shape
    key_heads, page_keys, value_dim = value.shape[1:]
    n_keys = page_keys if pages is None else pages.n_keys
    dtype = query.dtype
    out = torch.empty((batch, n_queries, heads, value_dim), dtype=dtype)
    if mask is None:
        mask_fields: tuple[Any, ...] = (0, (0, 0, 0), _NO_MASK)
    else:
        mask = mask.expand(batch, heads, n_queries, n_keys)
        if mask.stride(3) != 1:
            mask = mask.contiguous()
        kind = _BOOLEAN_MASK if mask.dtype == torch.bool else DTYPE_CODES[mask.dtype]
        mask_fields = (mask.data_ptr(), mask.stride()[:3], kind)
    is_many = n_queries > FEW_QUERIES
    n_items, n_bytes = batch * key_heads, batch * key_heads * n_keys * (dim + value_dim) * dtype.itemsize
    n_threads = torch.get_num_threads() if is_many else min(n_items, threads_for(n_bytes))
    call = AttentionCall(
        *(native.cpu_features(), parallel_address(), n_threads),
        *(DTYPE_CODES[dtype], batch, key_heads, heads // key_heads, n_queries, n_keys, dim, value_dim),
        *(query.data_ptr(), query.stride()[:3], key.data_ptr(), key.stride()[:3]),
        *(value.data_ptr(), value.stride()[:3], *mask_fields, out.data_ptr(), is_causal, is_many),
        *(0 if pages is None else pages.numbers.data_ptr(), page_keys),
        dim**-0.5 if scale is None else scale,
    )
    if library.moe_attention(ctypes.addressof(call)):
        raise MemoryError(f"no memory for attention of {n_queries} queries")
    return out


def fits(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, pages: Pages | None = None
) -> bool:
    """Whether `cpu_attention` accepts these arguments."""
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        return False
    batch, heads, n_queries, dim = query.shape
    key_batch, key_heads, n_keys, key_dim = key.shape
    if pages is not None:
        numbers = pages.numbers
        if (
            batch != 1
            or pages.n_keys > len(numbers) * n_keys
            or not numbers.is_contiguous()
            or not numbers.is_cpu
            or numbers.dtype != torch.int64
        ):
            return False
        key_batch, n_keys = 1, pages.n_keys
    dtype = query.dtype
    return (
        (n_queries <= FEW_QUERIES or (takes_many(dtype) and dim % 2 == 0))
        and key_batch == batch
        and key_dim == dim
        and value.shape[:3] == key.shape[:3]
        and n_keys > 0
        and heads >= key_heads > 0
        and heads % key_heads == 0
        and dtype in DTYPE_CODES
        and key.dtype == dtype
        and value.dtype == dtype
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and query.device.type == key.device.type == value.device.type == "cpu"
        and (mask is None or _mask_fits(mask, (batch, heads, n_queries, n_keys), dtype))
    )


def takes_many(dtype: torch.dtype) -> bool:
    """Whether `cpu_attention` takes more than FEW_QUERIES queries of a dtype on this CPU; if not, torch is fast."""
    features = native.cpu_features()
    return dtype == torch.bfloat16 and Features.BF16_DOT in features and Features.MATRIX_UNIT not in features


def _mask_fits(mask: torch.Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype) -> bool:
    return (
        mask.ndim <= 4
        and mask.device.type == "cpu"
        and mask.dtype in (torch.bool, torch.float32, dtype)
        and all(mine in (1, want) for mine, want in zip(reversed(mask.shape), reversed(shape), strict=False))
    )
