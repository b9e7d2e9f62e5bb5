"""Quantises float weights, for ``--expert-format`` and ``--dense-format``. Deterministic."""

from __future__ import annotations

from typing import Final

import torch

from moeoffload.formats import mxfp4
from moeoffload.formats.int4 import SIGNED
from moeoffload.formats.packed import Codes, PackedFormat, PackedWeights, Scales

GROUP: Final = 32
BLOCK: Final = 128

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


def quantise(weights: torch.Tensor, form: PackedFormat) -> PackedWeights:
    """Quantises (n_experts, n_out, n_in) floats of any dtype to one of `FORMATS`, scaled by each group's largest value.

    int8 and int4 are symmetric with a float16 scale for each 32 weights (as GGUF's Q8_0 and Q4_0), fp8 is e4m3 with a
    scale for each 128 x 128 weights, mxfp4 is OCP's. Does not check whether values are finite.
    """
    n_experts, n_out, n_in = weights.shape
    packed = PackedWeights.empty(form, n_experts, n_out, n_in, weights.device)
    for expert in range(n_experts):
        rows = weights[expert].float()
        if form.shared_rows > 1:
            _fill_blocks(packed, expert, rows)
        else:
            _fill_groups(packed, expert, rows)
    return packed


def squared_errors(weights: torch.Tensor, packed: PackedWeights) -> tuple[float, float]:
    """Returns the sum of squared errors of ``packed``, and that of squares of ``weights`` (n_experts, n_out, n_in)."""
    wrong = total = 0.0
    for expert in range(weights.shape[0]):
        exact = weights[expert].float()
        wrong += float((packed.unpack(torch.float32, slice(expert, expert + 1))[0] - exact).square().sum())
        total += float(exact.square().sum())
    return wrong, total


def _fill_groups(packed: PackedWeights, expert: int, rows: torch.Tensor) -> None:
    form, n_in = packed.format, packed.n_in
    n_groups = form.n_groups(n_in)
    grouped = torch.nn.functional.pad(rows, (0, n_groups * GROUP - n_in)).view(rows.shape[0], n_groups, GROUP)
    largest = grouped.abs().amax(dim=-1)
    if form.scales is Scales.E8M0:
        exponents = torch.frexp(largest).exponent - 1 - _LARGEST_E2M1_EXPONENT
        stored = torch.where(largest > 0, exponents + _E8M0_BIAS, 0).clamp(0, 254).to(torch.uint8)
        scales = torch.exp2(stored.float() - _E8M0_BIAS)
        scaled = grouped / scales.unsqueeze(-1)
        magnitudes = torch.tensor(mxfp4.POSITIVE)
        # Ties round to the even code, as in rounding to a float.
        middles = (magnitudes[1:] + magnitudes[:-1]) / 2
        size = scaled.abs()
        codes = torch.bucketize(size, middles)
        codes += ((size == middles[codes.clamp(max=6)]) & (codes % 2 == 1)).long()
        codes = codes + 8 * torch.signbit(scaled)
    else:
        if form.codes is Codes.INT8:
            exact = largest / 127
        else:
            # The value of largest magnitude becomes -8, whatever its sign: of the 16 levels one more is negative.
            at = grouped.abs().argmax(dim=-1, keepdim=True)
            exact = grouped.gather(-1, at).squeeze(-1) / -8
        stored = torch.where(exact.abs() < _LEAST_SCALE, 0, exact).half()
        scales = stored.float().unsqueeze(-1)
        codes = torch.where(scales != 0, grouped / scales, 0).round()
        codes = codes.clamp(-127, 127) if form.codes is Codes.INT8 else codes.clamp(-8, 7) + 8
    codes = codes.flatten(1)[:, :n_in]
    packed.section("scales")[expert] = stored.contiguous().view(torch.uint8)
    if form.codes is Codes.INT8:
        packed.section("codes")[expert] = codes.to(torch.int8).view(torch.uint8)
        return
    nibbles = torch.nn.functional.pad(codes.to(torch.uint8), (0, n_in % 2))
    packed.section("codes")[expert] = nibbles[:, ::2] | nibbles[:, 1::2] << 4


def _fill_blocks(packed: PackedWeights, expert: int, rows: torch.Tensor) -> None:
    n_out, n_in = rows.shape
    n_row_blocks, n_groups = -(-n_out // BLOCK), packed.format.n_groups(n_in)
    padded = torch.nn.functional.pad(rows, (0, n_groups * BLOCK - n_in, 0, n_row_blocks * BLOCK - n_out))
    blocks = padded.view(n_row_blocks, BLOCK, n_groups, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scales = torch.where(largest > 0, largest / _LARGEST_FP8, 1)
    codes = (blocks / scales[:, None, :, None]).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
    packed.section("codes")[expert] = codes.view(torch.uint8).view(padded.shape)[:n_out, :n_in]
    assert packed.scales is not None
    packed.scales[expert] = scales
