"""Makes transformers' "sdpa" attention call `cpu_attention` in the models for which that was requested.

Replaces the function registered under "sdpa"; calls of other models, or that `cpu_attention` does not take, are passed
on to the original. A separate name would be simpler, but some families choose their mask by checking for "sdpa".
"""

from __future__ import annotations

import inspect
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from moeoffload.kernels.attention import Pages, cpu_attention, fits

_NAME: Final = "sdpa"
_KNOWN: Final = {
    "module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs",
}  # fmt: skip
# Arguments that change the computation. transformers' function ignores arguments that it does not name; so does ours.
_OTHER: Final = tuple(
    sorted(inspect.signature(sdpa_attention_forward).parameters.keys() - _KNOWN | {"softcap", "s_aux"})
)

_modules: WeakSet[nn.Module] = WeakSet()
"""All modules of the models for which `accelerate_attention` was called."""


def is_plain(module: nn.Module, dropout: float = 0.0, **kwargs: Any) -> bool:
    """Whether `attention` of this module and these arguments is what `cpu_attention` computes."""
    return module in _modules and dropout == 0.0 and all(kwargs.get(name) is None for name in _OTHER)


def attention_if_fast(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    pages: Pages | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """As transformers' ``sdpa_attention_forward``, for an accelerated model; keys and values may lie in pages, see
    `cpu_attention` for all shapes. Returns (batch, queries, heads, value dim), or None if transformers' own must
    compute."""
    if (
        torch.compiler.is_compiling()
        or not is_plain(module, dropout, **kwargs)
        or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
        or query.shape[1] != key.shape[1] * getattr(module, "num_key_value_groups", 1)
    ):
        return None
    n_queries = query.shape[2]
    causal = n_queries > 1 and attention_mask is None
    if causal:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and pages is None and key.shape[2] > n_queries:
            # As in transformers: the queries are at the beginning of a longer cache.
            key, value = key[:, :, :n_queries], value[:, :, :n_queries]
    if not fits(query, key, value, attention_mask, pages):
        return None
    return cpu_attention(query, key, value, attention_mask, scale=scaling, is_causal=causal, pages=pages)


def attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Called by transformers; see its ``sdpa_attention_forward``."""
    out = attention_if_fast(*args, **kwargs)
    if out is not None:
        return out, None
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(*args, **kwargs)
    return result


def accelerate_attention(model: nn.Module) -> None:
    """Makes the "sdpa" attention of a transformers model on the CPU call `cpu_attention`.

    Calls with gradient, dropout or further arguments, under ``torch.compile``, or that `cpu_attention` does not take
    are computed as before. Other models of the process are not affected.
    """
    configs = (getattr(module, "config", None) for module in model.modules())
    if any(getattr(config, "_attn_implementation", None) == _NAME for config in configs):
        _modules.update(model.modules())
        AttentionInterface.register(_NAME, attention)
