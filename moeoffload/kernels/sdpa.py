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

from moeoffload.kernels.attention import cpu_attention, fits

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


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Called by transformers; see its ``sdpa_attention_forward``."""
    if (
        not torch.compiler.is_compiling()
        and module in _modules
        and dropout == 0.0
        and not any(kwargs.get(name) is not None for name in _OTHER)
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
        and query.shape[1] == key.shape[1] * getattr(module, "num_key_value_groups", 1)
    ):
        n_queries = query.shape[2]
        causal = n_queries > 1 and attention_mask is None
        if causal:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            if causal and key.shape[2] > n_queries:
                # As in transformers: the queries are at the beginning of a longer cache.
                key, value = key[:, :, :n_queries], value[:, :, :n_queries]
        if fits(query, key, value, attention_mask):
            return cpu_attention(query, key, value, attention_mask, scale=scaling, is_causal=causal), None
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )
    return result


def accelerate_attention(model: nn.Module) -> None:
    """Makes the "sdpa" attention of a transformers model on the CPU call `cpu_attention`.

    Calls with gradient, dropout or further arguments, under ``torch.compile``, or that `cpu_attention` does not take
    are computed as before. Other models of the process are not affected.
    """
    configs = (getattr(module, "config", None) for module in model.modules())
    if any(getattr(config, "_attn_implementation", None) == _NAME for config in configs):
        _modules.update(model.modules())
        AttentionInterface.register(_NAME, _attention)
