"""Grouped matrix products over rows sorted by expert; supports every layout of the decorated experts classes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from moeoffload.formats.packed import PackedWeights
from moeoffload.kernels.packing import Weights, first_tensor, up_weight


def grouped_experts(
    experts: nn.Module, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, *, may_wait: bool = True
) -> torch.Tensor:
    """Sorts routes by expert and runs one grouped product per projection.

    The order of operations and every rounding step are those of transformers' ``grouped_mm`` experts implementation
    (``transformers.integrations.moe``), so that a server that holds all experts of a layer gives the same bits as a
    local run with it. The experts class's layout flags and ``_apply_gate`` determine biases, transposed and interleaved
    weights, clamps and norms.

    Args:
        experts: the model's own experts class with only the experts held here.
        rows: (n, hidden) in the compute dtype.
        slots: (n, top_k) int64, the expert of each route; -1 where it is not held here.
        weights: (n, top_k) float32 or the compute dtype.
        may_wait: whether the CPU may read values from the device, which on a GPU waits for all queued work. If so,
            absent routes are removed. If not, they are sorted behind all groups, where no product reads or writes
            them, and masked at the end; a slot above the last expert then also counts as absent.

    Returns:
        (n, hidden) float32: for each row the weighted sum over its experts.
    """
    module: Any = experts
    top_k = slots.shape[1]
    weight = up_weight(module)
    # Packed weights are unpacked expert by expert, so the CPU has to know which experts are hit.
    sort = _sort_and_cut if may_wait or isinstance(weight, tuple) else sort_without_waiting
    slot_of_route, route, offsets, absent = sort(slots.reshape(-1), first_tensor(weight).shape[0])

    values = _grouped_linear(rows[route // top_k], weight, offsets, module.is_transposed)
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
    if absent is not None:
        values = values.masked_fill_(absent.unsqueeze(-1), 0)

    # Absent routes are zero: experts that this server does not hold add nothing to the sum.
    shape = (slots.numel(), values.shape[1])
    by_route = values.new_empty(shape) if len(route) == slots.numel() else values.new_zeros(shape)
    by_route[route] = values
    return by_route.view(rows.shape[0], top_k, -1).sum(dim=1, dtype=torch.float32)


class SortedRoutes(NamedTuple):
    """Routes sorted by slot: slots (routes,), route numbers (routes,), the end of each expert's group (n_experts,)
    int32, and a mask of the absent routes (routes,), or None if absent routes were removed."""

    slots: torch.Tensor
    routes: torch.Tensor
    offsets: torch.Tensor
    absent: torch.Tensor | None


def _sort_and_cut(slots: torch.Tensor, n_experts: int) -> SortedRoutes:
    sorted_slots, routes = torch.sort(slots)
    n_absent = int((sorted_slots < 0).sum())
    if n_absent:
        sorted_slots, routes = sorted_slots[n_absent:], routes[n_absent:]
    offsets = torch.bincount(sorted_slots, minlength=n_experts).cumsum(0, dtype=torch.int32)
    return SortedRoutes(sorted_slots, routes, offsets, None)


def sort_without_waiting(slots: torch.Tensor, n_experts: int) -> SortedRoutes:
    """Sorts (routes,) slots without reading from the device; slots that do not exist come last, behind all groups."""
    exists = (slots >= 0) & (slots < n_experts)
    sorted_slots, routes = torch.sort(torch.where(exists, slots, n_experts))
    # torch.bincount would wait for the device to learn the length of its result.
    experts = torch.arange(n_experts, device=slots.device)
    offsets = torch.searchsorted(sorted_slots, experts, right=True, out_int32=True)
    return SortedRoutes(sorted_slots.clamp(max=n_experts - 1), routes, offsets, sorted_slots == n_experts)


def _grouped_linear(values: torch.Tensor, weight: Weights, offsets: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """(routes, in) x (experts, out, in) -> (routes, out); if ``is_transposed``, plain weights are (experts, in,
    out)."""
    if isinstance(weight, tuple):
        return _unpacking_linear(values, weight, offsets)
    return functional.grouped_mm(values, weight if is_transposed else weight.transpose(-2, -1), offs=offsets)


def _unpacking_linear(values: torch.Tensor, parts: tuple[PackedWeights, ...], offsets: torch.Tensor) -> torch.Tensor:
    """As `_grouped_linear` with packed weights; unpacks one expert at a time, in extra memory."""
    out = values.new_empty(len(values), sum(part.shape[1] for part in parts))
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            one = slice(expert, expert + 1)
            weight = torch.cat([part.unpack(values.dtype, one) for part in parts], dim=1)
            out[start:end] = _grouped_linear(values[start:end], weight, offsets.new_tensor([end - start]), False)
        start = end
    return out
