"""The experts function that transformers calls in place of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moeoffload.errors import ModelError

IMPLEMENTATION: Final = "moeoffload"
"""Name under which transformers knows the function (``experts_implementation``)."""

ExpertsCall = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""hidden (n, hidden), top-k ids (n, top_k) int64, weights (n, top_k) -> (n, hidden) in the dtype of hidden."""


def remote_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts function for transformers' ``ExpertsInterface``; ``self`` is the experts module of one layer.

    Raises:
        ModelError: the module belongs to no open model.
    """
    call: ExpertsCall | None = getattr(self, "moeoffload_call", None)
    if call is None:
        raise ModelError("this model's routed experts are not attached to expert servers; use moeoffload.open_model")
    return call(hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, remote_experts)
