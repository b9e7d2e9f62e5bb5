"""Experts modules of several kinds with random weights, and what they should compute, in plain float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts


@use_experts_implementation(has_gate=False)
class UngatedExperts(nn.Module):
    """Up projection, activation, down projection."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        n_experts, hidden, inter = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.num_experts = n_experts
        self.up_proj = nn.Parameter(torch.empty(n_experts, inter, hidden))
        self.down_proj = nn.Parameter(torch.empty(n_experts, hidden, inter))
        self.act_fn = ACT2FN[config.hidden_act]


def make_experts(
    kind: str, n_experts: int, hidden: int, inter: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> Any:
    """``kind``: gpt_oss, or an activation of transformers with a gate, or without one: ungated-relu2."""
    if kind == "gpt_oss":
        config = CONFIG_MAPPING["gpt_oss"](num_local_experts=n_experts, hidden_size=hidden, intermediate_size=inter)
        experts: Any = GptOssExperts(config)
    else:
        config = CONFIG_MAPPING["qwen3_moe"](
            num_experts=n_experts,
            hidden_size=hidden,
            moe_intermediate_size=inter,
            hidden_act=kind.removeprefix("ungated-"),
        )
        experts = (UngatedExperts if kind.startswith("ungated-") else Qwen3MoeExperts)(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in experts.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 3:
            values *= parameter.shape[-2 if kind == "gpt_oss" else -1] ** -0.5
        parameter.data = values.to(device, dtype)
        parameter.requires_grad_(False)
    return experts.eval()


def reference(experts: Any, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(n, hidden) float64: every route by itself, without any rounding in between."""
    up = experts.gate_up_proj if experts.has_gate else experts.up_proj
    up_bias = getattr(experts, "gate_up_proj_bias" if experts.has_gate else "up_proj_bias", None)
    out = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    for row, choice in (slots >= 0).nonzero().tolist():
        expert = int(slots[row, choice])
        values = _linear(rows[row : row + 1], up[expert], up_bias, expert, experts.is_transposed)
        values = experts._apply_gate(values) if experts.has_gate else experts.act_fn(values)
        values = _linear(
            values, experts.down_proj[expert], getattr(experts, "down_proj_bias", None), expert, experts.is_transposed
        )
        out[row] += values[0] * weights[row, choice].double()
    return out


def _linear(values: torch.Tensor, weight: torch.Tensor, bias: Any, expert: int, is_transposed: bool) -> torch.Tensor:
    weight = weight.double() if is_transposed else weight.double().t()
    return values.double() @ weight + (bias[expert].double() if bias is not None else 0.0)
