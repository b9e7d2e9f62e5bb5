"""Quantises float weights, for ``--expert-format`` and ``--dense-format``. Deterministic."""

from __future__ import annotations

from typing import Final

import torch

from moeoffload.formats import mxfp4
from moeoffload.formats.int4 import SIGNED
from moeoffload.formats.packed import Codes, PackedFormat, PackedWeights, Scales

GROUP: Final = 32
BLOCK: Final = 128
_CACHED: Final = 1 << 16
"""About so many weights are quantised at a time: what is computed with them stays in a core's cache."""

FORMATS: Final = {
    "int8": PackedFormat("int8", Codes.INT8, Scales.F16, group=GROUP),
    "int4": PackedFormat("int4", Codes.LEVELS4, Scales.F16, group=GROUP, levels=SIGNED),
    "fp8": PackedFormat("fp8", Codes.FP8, Scales.F32, group=BLOCK, shared_rows=BLOCK),
    "mxfp4": mxfp4.FORMAT,
}
"""The formats by the names that users give."""
_LARGEST_FP8: Final = 448.0
_LEAST_SCALE: Final = 2.0**-24
"""The smallest positive float16; a group whose scale is below it becomes zeros."""
_E8M0_BIAS: Final = 127
_LARGEST_E2M1_EXPONENT: Final = 2


def quantise(weights: torch.Tensor, form: PackedFormat) -> tuple[PackedWeights, float, float]:
    """Quantises (n_experts, n_out, n_in) floats of any dtype to one of `FORMATS`, scaled by each group's largest value.

    int8 and int4 are symmetric with a float16 scale for each 32 weights (as GGUF's Q8_0 and Q4_0), fp8 is e4m3 with a
    scale for each 128 x 128 weights, mxfp4 is OCP's. Does not check whether values are finite.

    Returns the packed weights, the sum of their squared errors, and that of the squares of ``weights``.
    """
    n_experts, n_out, n_in = weights.shape
    packed = PackedWeights.empty(form, n_experts, n_out, n_in, weights.device)
    fill = _fill_blocks if form.shared_rows > 1 else _fill_groups
    n_rows = form.shared_rows if form.shared_rows > 1 else max(1, _CACHED // n_in)
    wrong = total = 0.0
    for expert in range(n_experts):
        for start in range(0, n_out, n_rows):
            # Some families store matrices transposed: their rows are strided.
            rows = weights[expert, start : start + n_rows].float().contiguous()
            wrong += fill(packed, expert, start, rows)
            total += float(rows.flatten().dot(rows.flatten()))
    return packed, wrong, total


def _fill_groups(packed: PackedWeights, expert: int, start: int, rows: torch.Tensor) -> float:
    """Quantises ``rows`` (n, n_in) float32, those from ``start`` on; returns the sum of squared errors."""
    form, n_in = packed.format, packed.n_in
    n_rows, n_groups = rows.shape[0], form.n_groups(n_in)
    grouped = torch.nn.functional.pad(rows, (0, n_groups * GROUP - n_in)).view(n_rows, n_groups, GROUP)
    least, most = grouped.amin(-1), grouped.amax(-1)  # each several times as fast as torch.aminmax
    if form.scales is Scales.E8M0:
        exponents = torch.frexp(torch.maximum(-least, most)).exponent - 1 - _LARGEST_E2M1_EXPONENT
        stored = torch.where((least < 0) | (most > 0), exponents + _E8M0_BIAS, 0).clamp(0, 254).to(torch.uint8)
        scales = torch.exp2(stored.float() - _E8M0_BIAS).unsqueeze(-1)
        codes, values = _round_e2m1(grouped / scales)
    else:
        if form.codes is Codes.INT8:
            exact, lowest, highest = torch.maximum(-least, most) / 127, -127, 127
        else:
            # The value of largest magnitude becomes -8, whatever its sign: of the 16 levels one more is negative.
            exact, lowest, highest = torch.where(-least >= most, least, most) / -8, -8, 7
        stored = torch.where(exact.abs() < _LEAST_SCALE, 0, exact).half()
        scales = stored.float().unsqueeze(-1)
        values = (grouped * torch.where(scales != 0, 1 / scales, 0)).round_().clamp_(lowest, highest)
        codes = (values if form.codes is Codes.INT8 else values + 8).to(torch.int8)
    packed.section("scales")[expert, start : start + n_rows] = stored.contiguous().view(torch.uint8)
    codes = codes.flatten(1)[:, :n_in]
    if form.codes is not Codes.INT8:
        pairs = torch.nn.functional.pad(codes, (0, n_in % 2)).view(torch.int16)
        codes = (pairs | pairs >> 4).to(torch.int8)
    packed.section("codes")[expert, start : start + n_rows] = codes.view(torch.uint8)
    return float(values.mul_(scales).sub_(grouped).square_().sum())


def _round_e2m1(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes (int8) of E2M1 next to float32 values of less than 8, ties to the even code, and the codes'
    values (float32), both shaped like ``scaled``."""
    size = scaled.abs()
    raw = size.view(torch.int32)
    raw = raw + 0x1FFFFF + (raw >> 22 & 1)  # one bit of the fraction stays
    # Steps of a half up to 2, and floats with one bit of fraction from 1 on, are the values; between 1 and 2 both are.
    halves = (2 * size).round_().clamp_(max=4)
    codes = torch.maximum(halves.int(), (raw >> 22) - 2 * 126).clamp_(max=7)
    floats = torch.nn.functional.threshold((raw & ~0x3FFFFF).view(torch.float32), 0.9, 0.0).clamp_(max=6)
    values = torch.maximum(halves / 2, floats).copysign_(scaled)
    return (codes | scaled.view(torch.int32) >> 28 & 8).to(torch.int8), values


def _fill_blocks(packed: PackedWeights, expert: int, start: int, rows: torch.Tensor) -> float:
    """As `_fill_groups`, for the rows of one block."""
    n_rows, n_in = rows.shape
    n_groups = packed.format.n_groups(n_in)
    blocks = torch.nn.functional.pad(rows, (0, n_groups * BLOCK - n_in)).view(n_rows, n_groups, BLOCK)
    largest = blocks.abs().amax(dim=(0, 2))
    scales = torch.where(largest > 0, largest / _LARGEST_FP8, 1).unsqueeze(-1)
    codes = (blocks / scales).clamp_(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
    packed.section("codes")[expert, start : start + n_rows] = codes.view(torch.uint8).flatten(1)[:, :n_in]
    assert packed.scales is not None
    packed.scales[expert, start // BLOCK] = scales.squeeze(-1)
    return float(codes.float().mul_(scales).sub_(blocks).square_().sum())
