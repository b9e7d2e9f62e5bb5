"""Experts modules with random weights, plain and packed in every format of checkpoints; what they should compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moeoffload.formats.packed import Codes, Offsets, PackedFormat, PackedWeights, Scales


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


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4 = tuple(float(level) for level in range(-8, 8))
UINT4 = tuple(float(level) for level in range(16))
IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
PLAIN = {torch.bfloat16: Codes.BFLOAT16, torch.float16: Codes.FLOAT16, torch.float32: Codes.FLOAT32}

FORMATS = (
    PackedFormat("fp8 blocks", Codes.FP8, Scales.F32, group=128, shared_rows=128),
    PackedFormat("fp8 small blocks", Codes.FP8, Scales.F32, group=16, shared_rows=16),
    PackedFormat("fp8 channels", Codes.FP8, Scales.F32),
    PackedFormat("mxfp8", Codes.FP8, Scales.E8M0, group=32),
    *(
        PackedFormat(f"int8 {scales.name} {group}", Codes.INT8, scales, group=group)
        for scales in (Scales.F16, Scales.BF16, Scales.F32)
        for group in (32, 128, 0)
    ),
    PackedFormat("int8 zero", Codes.INT8, Scales.F16, Offsets.ZERO, 128),
    PackedFormat("mxfp4", Codes.LEVELS4, Scales.E8M0, group=32, levels=E2M1),
    *(
        PackedFormat(f"int4 {scales.name} {group} {offsets.name}", Codes.LEVELS4, scales, offsets, group, levels)
        for scales in (Scales.F16, Scales.BF16)
        for group in (32, 64, 128)
        for offsets, levels in ((Offsets.NONE, INT4), (Offsets.ZERO, UINT4))
    ),
    PackedFormat("nvfp4-like", Codes.LEVELS4, Scales.BF16, group=16, levels=E2M1),
    PackedFormat("q4_k", Codes.LEVELS4, Scales.SUPER, Offsets.MIN, 32, UINT4),
    PackedFormat("iq4_xs", Codes.LEVELS4, Scales.SUPER, group=32, levels=IQ4),
    PackedFormat("q5_k", Codes.UINT5, Scales.SUPER, Offsets.MIN, 32),
    PackedFormat("q6_k", Codes.INT6, Scales.SUPER, group=16),
    *(PackedFormat(code.name, code) for code in PLAIN.values()),
)
BY_NAME = {form.name: form for form in FORMATS}


def random_packed(form: PackedFormat, n_experts: int, n_out: int, n_in: int, seed: int = 0) -> PackedWeights:
    """All codes, and scales of all sizes, zero and the least that there are; none so large that sums overflow."""
    generator = torch.Generator().manual_seed(seed)
    packed = PackedWeights.empty(form, n_experts, n_out, n_in, torch.device("cpu"))
    packed.data.copy_(torch.randint(0, 256, packed.data.shape, generator=generator, dtype=torch.uint8))

    def scales(shape: tuple[int, ...]) -> torch.Tensor:
        # Levels reach 448, and 2 ** -6 of that times sqrt(n_in) is no overflow in float16.
        values = torch.exp2(-14 + 6 * torch.rand(shape, generator=generator))
        values[torch.rand(shape, generator=generator) < 0.1] *= 2.0**-11
        values[torch.rand(shape, generator=generator) < 0.05] *= 2.0**-110
        values[torch.rand(shape, generator=generator) < 0.05] = 0.0
        return values

    codes = packed.section("codes")
    if form.codes is Codes.FP8:
        codes[(codes & 0x7F) == 0x7F] -= 1
        # Kernels may unpack normal numbers in a shorter way: of half of the columns, all are.
        some = codes[..., : n_in // 2]
        some[(some & 0x78) == 0] += 8
    if form.codes in PLAIN.values():
        dtype = next(dtype for dtype, code in PLAIN.items() if code is form.codes)
        weights = torch.randn(n_experts, n_out, n_in, generator=generator) / n_in**0.5
        codes.copy_(weights.to(dtype).view(torch.uint8))
    elif form.scales is Scales.SUPER:
        for name in ("factors", "min_factors") if form.offsets is Offsets.MIN else ("factors",):
            part = packed.section(name)
            values = scales((*part.shape[:2], part.shape[2] // 2)) * 2.0**-6
            part.copy_(values.to(torch.float16).view(torch.uint8))
    elif packed.scales is not None:
        packed.scales.copy_(scales(tuple(packed.scales.shape)))
    elif form.scales is Scales.E8M0:
        part = packed.section("scales")
        part.copy_(torch.randint(0, 120, part.shape, generator=generator, dtype=torch.uint8))
        part[torch.rand(part.shape, generator=generator) < 0.7] = 118
    else:
        dtype = {Scales.F32: torch.float32, Scales.F16: torch.float16, Scales.BF16: torch.bfloat16}[form.scales]
        part = packed.section("scales")
        part.copy_(scales((*part.shape[:2], part.shape[2] // dtype.itemsize)).to(dtype).view(torch.uint8))
    return packed


def pack_experts(
    experts: Any, up: tuple[PackedWeights, ...], down: tuple[PackedWeights, ...], dtype: torch.dtype
) -> Any:
    up_name = "gate_up_proj" if experts.has_gate else "up_proj"
    delattr(experts, up_name)
    delattr(experts, "down_proj")
    setattr(experts, up_name, up)
    experts.down_proj, experts.compute_dtype = down, dtype
    return experts


def unpacked(parts: tuple[PackedWeights, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([part.unpack(dtype) for part in parts], dim=1)


def make_packed(
    kind: str,
    forms: tuple[PackedFormat, ...],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    down: PackedFormat | None = None,
    keep_the_least: bool = False,
) -> tuple[Any, Any]:
    """The same experts packed, and plain; of two formats, one is that of gates, the other of ups and ``down``.

    ``shape``: (n_experts, hidden, inter). ``keep_the_least``: scales with which weights become subnormal stay.
    """
    n_experts, hidden, inter = shape
    packed, plain = (make_experts(kind, n_experts, hidden, inter, dtype, device) for _ in range(2))
    n_up = (2 if plain.has_gate else 1) * inter // len(forms)

    def pack(form: PackedFormat, n_out: int, n_in: int, seed: int) -> PackedWeights:
        weights = random_packed(form, n_experts, n_out, n_in, seed)
        return weights if keep_the_least else _on(weights, device)

    up = tuple(pack(form, n_up, hidden, seed) for seed, form in enumerate(forms))
    downs = (pack(down or forms[-1], hidden, inter, 7),)
    for name, parts in (("gate_up_proj" if plain.has_gate else "up_proj", up), ("down_proj", downs)):
        weights = unpacked(parts, dtype)
        getattr(plain, name).copy_(weights.transpose(1, 2) if plain.is_transposed else weights)
    return pack_experts(packed, up, downs, dtype), plain


def without_the_least(packed: PackedWeights) -> PackedWeights:
    """The same without scales of which bfloat16 weights become subnormal: the interpreter takes those for zero."""
    dtype = {Scales.F32: torch.float32, Scales.BF16: torch.bfloat16}.get(packed.format.scales)
    if packed.scales is not None:
        packed.scales[packed.scales < 2.0**-60] = 0
    elif dtype is not None:
        scales = packed.section("scales").contiguous().view(dtype)
        packed.section("scales").copy_(torch.where(scales < 2.0**-60, 0, scales).view(torch.uint8))
    return packed


def _on(packed: PackedWeights, device: str) -> PackedWeights:
    packed = without_the_least(packed)
    scales = None if packed.scales is None else packed.scales.to(device)
    return replace(packed, data=packed.data.to(device), scales=scales)
