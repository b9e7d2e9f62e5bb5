"""MXFP4: 4-bit weights (E2M1) with a power of two (E8M0) as scale of each 32 (OCP MX v1.0), in three naming schemes.

``_blocks`` (..., out, in / 32, 16) and ``_scales`` (gpt-oss); int8 bytes (out, in / 2) with ``.scale`` (DeepSeek V4);
``.weight_packed`` with ``.weight_scale`` (compressed-tensors, ``mxfp4-pack-quantized``). All store the first of two
weights in the low half of a byte. Source: ``transformers.integrations.mxfp4`` and ``.finegrained_fp8``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from moeoffload.formats.file_format import E8M0_SCALES, FileFormat, Packing, Parts, check_shape, codes_and_scales
from moeoffload.formats.packed import Codes, PackedFormat, Scales

POSITIVE: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FORMAT: Final = PackedFormat(
    "mxfp4", Codes.LEVELS4, Scales.E8M0, group=32, levels=(*POSITIVE, *(-level for level in POSITIVE))
)


def pack_bytes(parts: Parts, settings: Mapping[str, Any]) -> Packing:
    """Returns how bytes (..., out, in / 2) and scales (..., out, in / 32) are packed."""
    *lead, n_out, n_bytes = parts["weight"].shape
    _check_dtype(parts["scale"])
    check_shape("scale", parts["scale"], *lead, n_out, -(-n_bytes // 16))
    return Packing(FORMAT, (*lead, n_out, 2 * n_bytes), codes_and_scales)


def pack_blocks(parts: Parts, settings: Mapping[str, Any]) -> Packing:
    """Returns how blocks (experts, out, in / 32, 16) of a weight (experts, in, out) of the model are packed."""
    if parts["weight"].dim() != 4 or parts["weight"].shape[-1] != 16:
        raise ValueError(f"its blocks have shape {tuple(parts['weight'].shape)}, needed is (experts, out, in / 32, 16)")
    n_experts, n_out, n_groups, _ = parts["weight"].shape
    _check_dtype(parts["scale"])
    check_shape("scale", parts["scale"], n_experts, n_out, n_groups)
    return Packing(FORMAT, (n_experts, 32 * n_groups, n_out), codes_and_scales, is_transposed=True)


def _check_dtype(scale: torch.Tensor) -> None:
    if scale.dtype not in E8M0_SCALES:
        raise ValueError(f"its scale is stored as {scale.dtype}, needed is E8M0")


WITH_SCALE: Final = FileFormat(
    ".weight", (torch.int8, torch.uint8), {"scale": (".weight_scale_inv", ".scale")}, pack_bytes
)
FILE_FORMATS: Final = (FileFormat("_blocks", (torch.uint8,), {"scale": ("_scales",)}, pack_blocks, plain=""),)
