"""Attention of a packed batch: each request's queries with its own keys and values, as if it ran alone.

transformers' continuous batching packs the rows of all requests into one sequence. Its "sdpa" then multiplies all
queries with all keys and masks what belongs to others; here every request is a call of its own, so that the cost is
that of the requests one by one, and so are the bits.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface

IMPLEMENTATION: Final = "moeoffload_paged"
"""Name under which transformers knows it (``attn_implementation``); it builds no masks for names it does not know."""
_ONE_BY_ONE: Final = "sdpa"


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls; shapes as in its ``sdpa_attention_forward``, with a batch of one.

    Args:
        module: the attention module; ``layer_idx`` says which layer of the cache is its own.
        query: (1, heads, rows, dim), the rows of all requests one after the other.
        key: (1, key heads, rows, dim), of the same rows.
        value: (1, key heads, rows, dim).
        attention_mask: not used: a row sees what comes before it in its own request.
        dropout: must be 0.
        scaling: of the products.
        is_causal: not used.
        cache: transformers' ``PagedAttentionCache``.
        kwargs: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, where requests begin, and the cache's own.
    """
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    attend = AttentionInterface()[_ONE_BY_ONE]
    window = getattr(module, "sliding_window", None)
    query_ends = kwargs["cu_seq_lens_q"].tolist()
    key_ends = kwargs["cu_seq_lens_k"].tolist()
    parts = []
    for i in range(1, len(query_ends)):
        n_queries, n_keys = query_ends[i] - query_ends[i - 1], key_ends[i] - key_ends[i - 1]
        mask = None if n_queries in (1, n_keys) else seen_keys(n_queries, n_keys, None, query.device)
        if window is not None and n_keys > window:
            mask = seen_keys(n_queries, n_keys, window, query.device)
        part, _ = attend(
            module,
            query.narrow(2, query_ends[i - 1], n_queries),
            key.narrow(2, key_ends[i - 1], n_keys),
            value.narrow(2, key_ends[i - 1], n_keys),
            mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=n_queries > 1 and mask is None,
        )
        parts.append(part)
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def seen_keys(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which keys each of the last ``n_queries`` tokens sees: bool (1, 1, n_queries, n_keys); itself, and what came
    before it, of which only the last ``window`` - 1."""
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril_(n_keys - n_queries)
    if window is not None:
        seen.triu_(n_keys - n_queries - window + 1)
    return seen[None, None]


AttentionInterface.register(IMPLEMENTATION, paged_attention)
