"""Packed weights of every format that checkpoints have, with random codes and scales."""

from __future__ import annotations

from typing import Any

import torch

from moeoffload.formats.packed import Codes, Offsets, PackedFormat, PackedWeights, Scales

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4 = tuple(float(level) for level in range(-8, 8))
UINT4 = tuple(float(level) for level in range(16))
IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
PLAIN = {torch.bfloat16: Codes.BFLOAT16, torch.float16: Codes.FLOAT16, torch.float32: Codes.FLOAT32}

FORMATS = (
    PackedFormat("fp8 blocks", Codes.FP8, Scales.F32, group=128, shared_rows=128),
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
