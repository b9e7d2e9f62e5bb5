"""Loads a checkpoint's own draft head. Its experts stay on the host: it runs between passes and uses no server."""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.draft_head import build_head
from moeoffload.errors import ModelError
from moeoffload.host.local_experts import LocalExperts
from moeoffload.host.model import bind_experts, quiet_transformers, without_expert_parameters
from moeoffload.kernels.fast_dense import accelerate_dense
from moeoffload.placement import ExpertTable


def load_draft_head(about: Checkpoint, main: Any, *, fast_dense: bool) -> Any:
    """Returns transformers' `MtpModel` with the weights of ``about`` (see `Checkpoint.draft_head`) and the embedding
    and output layer of ``main``. Raises ModelError: one of its tensors is missing."""
    device = main.device
    with without_expert_parameters(about.experts_classes), torch.device("meta"):
        head = build_head(main, about.dtype)
    how = LoadStateDictConfig(
        weight_mapping=head.get_weight_conversions(main), device_map={"": device}, dtype=about.dtype
    )
    with quiet_transformers():
        info, _ = convert_and_load_state_dict_in_model(head, dict(about.dense_tensors()), how)
    own = {name for name, _ in (*head.layers.named_parameters(), *head.layers.named_buffers())}
    missing = sorted(own & {name.removeprefix("layers.") for name in info.missing_keys})
    if missing:
        raise ModelError(f"--draft own: {about.path}: the layer's {missing[0]} is missing")
    head.tie_with_main_model(main)
    local = LocalExperts(about, ExpertTable(tuple(tuple(range(each.n_experts)) for each in about.layers)), device)

    def experts(layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sums = torch.empty(hidden.shape, dtype=torch.float32, device=device)
        local.compute(layer, hidden, ids, weights, sums)
        return sums.to(hidden.dtype)

    bind_experts(head, about, experts)
    if fast_dense and device.type == "cpu":
        accelerate_dense(head.layers)
    return head.eval()
