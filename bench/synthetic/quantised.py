"""Random weights in the layouts of quantised checkpoints, as their publishers store them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch

_LARGEST_FP8 = 448.0
_LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Encoded = dict[str, torch.Tensor]


class Quantised(StrEnum):
    """Layouts of quantised checkpoints."""

    FP8 = "fp8"
    """e4m3, 128 x 128 blocks, float32 ``weight_scale_inv``: DeepSeek V3, MiniMax M2, Qwen's ``-FP8``."""
    FP8_FP4 = "fp8-fp4"
    """Experts MXFP4 in int8 bytes, the rest FP8, E8M0 ``.scale``: DeepSeek V4."""
    FP8_CHANNEL = "fp8-channel"
    """compressed-tensors ``float-quantized``, a scale per row."""
    MXFP8 = "mxfp8"
    """e4m3, E8M0 per 32 as bytes."""
    MXFP4 = "mxfp4"
    """gpt-oss: ``_blocks`` and ``_scales``; other families compressed-tensors ``mxfp4-pack-quantized``."""
    INT4 = "int4"
    """compressed-tensors ``pack-quantized``, 4 bits, groups of 32, symmetric: Kimi K2."""
    INT4_ZERO = "int4-zero"
    """The same with groups of 128 and zero points."""
    INT8 = "int8"
    """compressed-tensors ``int-quantized``, a scale per row."""
    INT8_PACKED = "int8-packed"
    """compressed-tensors ``pack-quantized``, 8 bits, groups of 128."""
    GPTQ = "gptq"
    """4 bits, groups of 128, symmetric, ``desc_act`` false."""
    AWQ = "awq"
    """4 bits, groups of 128, zero points."""


def settings_of(form: Quantised, model_type: str) -> dict[str, Any]:
    """The quantization_config of such a checkpoint."""
    if form in (Quantised.FP8, Quantised.FP8_FP4):
        more = {"scale_fmt": "ue8m0", "expert_dtype": "fp4"} if form is Quantised.FP8_FP4 else {}
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], **more}
    if form is Quantised.MXFP8:
        return {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 32],
            "scale_fmt": "ue8m0",
        }
    if form is Quantised.MXFP4 and model_type == "gpt_oss":
        return {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    if form is Quantised.GPTQ:
        return {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    if form is Quantised.AWQ:
        return {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    values: dict[Quantised, tuple[str, dict[str, Any]]] = {
        Quantised.FP8_CHANNEL: ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        Quantised.MXFP4: (
            "mxfp4-pack-quantized",
            {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "scale_dtype": "torch.uint8",
                "zp_dtype": "torch.uint8",
            },
        ),
        Quantised.INT4: ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
        Quantised.INT4_ZERO: (
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False},
        ),
        Quantised.INT8: ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        Quantised.INT8_PACKED: (
            "pack-quantized",
            {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128},
        ),
    }
    layout, weights = values[form]
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | weights, "format": layout}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"],
    }


def encode(form: Quantised, model_type: str, name: str, weight: torch.Tensor) -> Encoded:
    """The tensors that are stored for a weight (out, in), or (experts, in, out) of gpt-oss; meta tensors give shapes.

    Embeddings, head, norms, routers and what has no whole groups of 128 columns stay plain.
    """
    if form is Quantised.MXFP4 and model_type == "gpt_oss":
        if weight.dim() != 3:
            return {name: weight}
        codes, scales = _mx4(weight.transpose(1, 2).contiguous())
        return {f"{name}_blocks": codes.unflatten(-1, (-1, 16)), f"{name}_scales": scales}
    plain = ("embed", "lm_head", "norm", ".gate.", "router", "head.")
    if weight.dim() != 2 or not name.endswith(".weight") or any(word in name for word in plain):
        return {name: weight}
    base = name.removesuffix(".weight")
    if form in (Quantised.GPTQ, Quantised.AWQ) and (weight.shape[1] % 128 or weight.shape[0] % 8):
        return {name: weight}
    return _ENCODERS[form](base, weight)


def _blocks(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The largest absolute value of each block, at least a little."""
    n_out, n_in = weight.shape
    padded = torch.nn.functional.pad(weight.float().abs(), (0, -n_in % columns, 0, -n_out % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3)).clamp_min(1e-6)


def _spread(each: torch.Tensor, rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    n_out, n_in = like.shape
    return each.repeat_interleave(rows, 0)[:n_out].repeat_interleave(columns, 1)[:, :n_in]


def _fp8(weight: torch.Tensor, rows: int, columns: int, *, power: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    scales = _blocks(weight, rows, columns) / _LARGEST_FP8
    if power:
        scales = scales.log2().ceil().exp2()
    return (weight.float() / _spread(scales, rows, columns, weight)).to(torch.float8_e4m3fn), scales


def _e8m0(scales: torch.Tensor) -> torch.Tensor:
    return (scales.log2() + 127).to(torch.uint8)


def _mx4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., in) -> bytes (..., in / 2), powers of two (..., in / 32) uint8."""
    groups = weight.float().unflatten(-1, (-1, 32))
    scales = (groups.abs().amax(-1).clamp_min(1e-6) / 6).log2().ceil().exp2()
    values = groups / scales.unsqueeze(-1)
    middles = ((_LEVELS[1:] + _LEVELS[:-1]) / 2).to(values.device)
    codes = torch.bucketize(values.abs(), middles) + 8 * (values < 0)
    return _nibbles(codes.flatten(-2)), _e8m0(scales)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """(..., n) of 0 to 15 -> (..., n / 2) uint8, the first in the low half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def _ints(weight: torch.Tensor, n_bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric: (out, in) int32 from -2^(n-1), bfloat16 scales (out, groups)."""
    top = (1 << (n_bits - 1)) - 1
    scales = (_blocks(weight, 1, group) / top).to(torch.bfloat16)
    codes = (weight.float() / _spread(scales.float(), 1, group, weight)).round().clamp(-top - 1, top)
    return codes.to(torch.int32), scales


def _with_zeros(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Asymmetric: (out, in) int32 of 0 to 15, zeros (out, groups) int32 of 1 to 15, scales (out, groups)."""
    groups = weight.float().unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp_max(-1e-3), groups.amax(-1).clamp_min(1e-3)
    scales = ((high - low) / 15).to(torch.float16)
    zeros = (-low / scales.float()).round().clamp(1, 15).to(torch.int32)
    codes = (groups / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return codes.clamp(0, 15).to(torch.int32).flatten(1), zeros, scales


def _words(codes: torch.Tensor, n_bits: int) -> torch.Tensor:
    """(rows, n) of unsigned codes -> (rows, n * n_bits / 32) int32, the first in the lowest bits."""
    per_word = 32 // n_bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word))
    shifts = torch.arange(0, 32, n_bits, device=codes.device)
    return (codes.unflatten(1, (-1, per_word)) << shifts).sum(-1).to(torch.int32)


def _shape(weight: torch.Tensor) -> torch.Tensor:
    return torch.tensor(weight.shape) if weight.device.type != "meta" else torch.empty(2, dtype=torch.int64).to("meta")


def _encode_fp8(base: str, weight: torch.Tensor) -> Encoded:
    codes, scales = _fp8(weight, 128, 128)
    return {f"{base}.weight": codes, f"{base}.weight_scale_inv": scales}


def _encode_fp8_fp4(base: str, weight: torch.Tensor) -> Encoded:
    if ".experts." in base:
        codes, exponents = _mx4(weight)
        return {f"{base}.weight": codes.view(torch.int8), f"{base}.scale": exponents.view(torch.float8_e8m0fnu)}
    codes, scales = _fp8(weight, 128, 128, power=True)
    return {f"{base}.weight": codes, f"{base}.scale": _e8m0(scales).view(torch.float8_e8m0fnu)}


def _encode_fp8_channel(base: str, weight: torch.Tensor) -> Encoded:
    codes, scales = _fp8(weight, 1, weight.shape[1])
    return {f"{base}.weight": codes, f"{base}.weight_scale": scales}


def _encode_mxfp8(base: str, weight: torch.Tensor) -> Encoded:
    codes, scales = _fp8(weight, 1, 32, power=True)
    return {f"{base}.weight": codes, f"{base}.weight_scale_inv": _e8m0(scales)}


def _encode_mxfp4(base: str, weight: torch.Tensor) -> Encoded:
    codes, exponents = _mx4(weight)
    return {f"{base}.weight_packed": codes, f"{base}.weight_scale": exponents}


def _encode_int4(base: str, weight: torch.Tensor) -> Encoded:
    codes, scales = _ints(weight, 4, 32)
    return {
        f"{base}.weight_packed": _words(codes + 8, 4),
        f"{base}.weight_scale": scales,
        f"{base}.weight_shape": _shape(weight),
    }


def _encode_int4_zero(base: str, weight: torch.Tensor) -> Encoded:
    codes, zeros, scales = _with_zeros(weight, 128)
    return {
        f"{base}.weight_packed": _words(codes, 4),
        f"{base}.weight_scale": scales.to(torch.bfloat16),
        f"{base}.weight_zero_point": _words(zeros.t(), 4).t().contiguous(),
        f"{base}.weight_shape": _shape(weight),
    }


def _encode_int8(base: str, weight: torch.Tensor) -> Encoded:
    codes, scales = _ints(weight, 8, weight.shape[1])
    return {f"{base}.weight": codes.to(torch.int8), f"{base}.weight_scale": scales}


def _encode_int8_packed(base: str, weight: torch.Tensor) -> Encoded:
    codes, scales = _ints(weight, 8, 128)
    return {
        f"{base}.weight_packed": _words(codes + 128, 8),
        f"{base}.weight_scale": scales,
        f"{base}.weight_shape": _shape(weight),
    }


def _encode_gptq(base: str, weight: torch.Tensor) -> Encoded:
    codes, scales = _ints(weight, 4, 128)
    # The format stores one less than the zero, 8.
    zeros = torch.full((weight.shape[1] // 128, weight.shape[0]), 7, device=weight.device)
    return {
        f"{base}.qweight": _words(codes + 8, 4).t().contiguous(),
        f"{base}.qzeros": _words(zeros, 4),
        f"{base}.scales": scales.t().to(torch.float16).contiguous(),
        f"{base}.g_idx": torch.arange(weight.shape[1], dtype=torch.int32, device=weight.device) // 128,
    }


def _encode_awq(base: str, weight: torch.Tensor) -> Encoded:
    codes, zeros, scales = _with_zeros(weight, 128)

    def interleaved(values: torch.Tensor) -> torch.Tensor:
        return _words(values.t().unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1), 4)

    return {
        f"{base}.qweight": interleaved(codes),
        f"{base}.qzeros": interleaved(zeros),
        f"{base}.scales": scales.t().contiguous(),
    }


_ENCODERS: dict[Quantised, Callable[[str, torch.Tensor], Encoded]] = {
    Quantised.FP8: _encode_fp8,
    Quantised.FP8_FP4: _encode_fp8_fp4,
    Quantised.FP8_CHANNEL: _encode_fp8_channel,
    Quantised.MXFP8: _encode_mxfp8,
    Quantised.MXFP4: _encode_mxfp4,
    Quantised.INT4: _encode_int4,
    Quantised.INT4_ZERO: _encode_int4_zero,
    Quantised.INT8: _encode_int8,
    Quantised.INT8_PACKED: _encode_int8_packed,
    Quantised.GPTQ: _encode_gptq,
    Quantised.AWQ: _encode_awq,
}
