"""Grouped matrix products over rows sorted by expert: covers every layout of the decorated experts classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moeoffload.kernels.base import ExpertKernel


class GroupedKernel(ExpertKernel):
    """Sorts routes by expert and runs one grouped product per projection.

    The order of operations and every rounding step are those of transformers' ``grouped_mm`` experts implementation
    (``transformers.integrations.moe``), so that a server that holds all experts of a layer gives the same bits as a
    local run with it. The layout flags and ``_apply_gate`` of the experts class decide about biases, transposed and
    interleaved weights, clamps and norms.
    """

    name = "grouped"

    def __call__(
        self, experts: nn.Module, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See `ExpertKernel`."""
        module: Any = experts
        top_k = slots.shape[1]
        slot_of_route, route = torch.sort(slots.reshape(-1))
        n_absent = int((slot_of_route < 0).sum())
        if n_absent:
            slot_of_route, route = slot_of_route[n_absent:], route[n_absent:]
        up_weight = module.gate_up_proj if module.has_gate else module.up_proj
        counts = torch.bincount(slot_of_route, minlength=up_weight.shape[0])
        offsets = counts.cumsum(0, dtype=torch.int32)

        values = _grouped_linear(rows[route // top_k], up_weight, offsets, module.is_transposed)
        if module.has_bias:
            bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
            values += bias[slot_of_route]
        values = module._apply_gate(values) if module.has_gate else module.act_fn(values)
        values = _grouped_linear(values, module.down_proj, offsets, module.is_transposed)
        if module.has_bias:
            values += module.down_proj_bias[slot_of_route]
        if module.has_post_expert_norm:
            values = module.post_expert_norm(values)
        values = values * weights.reshape(-1)[route].unsqueeze(-1)

        # Absent routes stay zero: what this server does not hold adds nothing to the sum.
        shape = (slots.numel(), values.shape[1])
        by_route = values.new_zeros(shape) if n_absent else values.new_empty(shape)
        by_route[route] = values
        return by_route.view(rows.shape[0], top_k, -1).sum(dim=1, dtype=torch.float32)


def _grouped_linear(
    values: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, is_transposed: bool
) -> torch.Tensor:
    """(routes, in) x (experts, out, in) -> (routes, out); ``is_transposed`` means weights are (experts, in, out)."""
    return functional.grouped_mm(values, weight if is_transposed else weight.transpose(-2, -1), offs=offsets)
