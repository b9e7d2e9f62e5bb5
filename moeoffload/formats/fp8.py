"""FP8 (e4m3) weights with scales per block, row or matrix, and MXFP8 (a power of two as scale of 32 weights).

Sources: ``transformers.integrations.finegrained_fp8.Fp8Dequantize`` (names, blocks, E8M0 scales as bytes), the
checkpoints of DeepSeek V3 and V4, MiniMax M2 and M3, and the ``-FP8`` ones of Qwen and GLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from moeoffload.formats import mxfp4
from moeoffload.formats.file_format import (
    E8M0_SCALES,
    FLOAT_SCALES,
    SHARED,
    FileFormat,
    Packing,
    Parts,
    as_bytes,
    codes_and_scales,
)
from moeoffload.formats.packed import Codes, PackedFormat, Scales

_IN_ROW: Final = FLOAT_SCALES | E8M0_SCALES
_MX_BLOCK: Final = (1, 32)
_BLOCK: Final = (128, 128)


def pack(parts: Parts, settings: Mapping[str, Any]) -> Packing:
    """Returns how FP8 weights (..., out, in) with their scales are packed; ``settings`` may state
    ``weight_block_size``.
    Raises ValueError, in one line, for scales of an unknown dtype or shape."""
    weight, scale = parts["weight"], parts["scale"]
    if scale.dtype not in _IN_ROW:
        raise ValueError(f"its scale is stored as {scale.dtype}")
    *lead, n_out, n_in = weight.shape
    if [*scale.shape[: len(lead)]] != lead:
        raise ValueError(f"its scale has shape {tuple(scale.shape)}, needed is one for each of {lead[0]} experts")
    # Scales per row may lack the last dimension, of size 1.
    grid = tuple(scale.shape[len(lead) :]) if scale.dim() > len(lead) + 1 else (*scale.shape[len(lead) :], 1)
    if grid == (n_out, 1) and n_in > 32:
        form = PackedFormat("fp8", Codes.FP8, _IN_ROW[scale.dtype])
        return Packing(form, tuple(weight.shape), codes_and_scales)
    for n_rows, n_columns in (_block_size(settings), _BLOCK, _MX_BLOCK):
        if grid != (-(-n_out // n_rows), -(-n_in // n_columns)):
            continue
        if n_rows == 1:
            name = "mxfp8" if (n_columns == 32 and _IN_ROW[scale.dtype] is Scales.E8M0) else "fp8"
            form = PackedFormat(name, Codes.FP8, _IN_ROW[scale.dtype], group=n_columns)
            return Packing(form, tuple(weight.shape), codes_and_scales)
        form = PackedFormat("fp8", Codes.FP8, Scales.F32, group=n_columns, shared_rows=n_rows)
        return Packing(form, tuple(weight.shape), _block_scales, is_verbatim=True)
    if scale.numel() == max(1, *lead, 0):
        return Packing(PackedFormat("fp8", Codes.FP8, Scales.F32), tuple(weight.shape), _one_scale)
    raise ValueError(f"its scale has shape {tuple(scale.shape)}, which fits no block size that is known")


def _block_size(settings: Mapping[str, Any]) -> tuple[int, int]:
    stated = settings.get("weight_block_size")
    if stated is None:
        return _BLOCK
    if not (isinstance(stated, list | tuple) and len(stated) == 2 and all(type(n) is int and n > 0 for n in stated)):
        raise ValueError(f"weight_block_size is {str(stated)[:40]}")
    if stated[1] % 16:
        raise ValueError(f"weight_block_size is {stated[0]} x {stated[1]}: its columns must be a multiple of 16")
    return stated[0], stated[1]


def _floats(scale: torch.Tensor) -> torch.Tensor:
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale).float()


def _one_scale(parts: Parts) -> dict[str, torch.Tensor]:
    codes = as_bytes(parts["weight"])
    scale = _floats(parts["scale"]).reshape(1, 1)
    return {"codes": codes, "scales": scale.view(torch.uint8).expand(len(codes), 4)}


def _block_scales(parts: Parts) -> dict[str, torch.Tensor]:
    return {"codes": as_bytes(parts["weight"]), SHARED: _floats(parts["scale"])}


_E4M3: Final = (torch.float8_e4m3fn,)
FILE_FORMATS: Final = (
    FileFormat(".weight", _E4M3, {"scale": (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")}, pack),
    # Experts in one tensor, as transformers saves them.
    FileFormat("", _E4M3, {"scale": ("_scale_inv", "_scale")}, pack, plain=""),
    mxfp4.WITH_SCALE,
)
