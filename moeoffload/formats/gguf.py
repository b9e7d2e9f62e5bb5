"""GGUF's block types: their formats in memory, and the conversion from the blocks of a file.

A file stores a row as blocks of 32 or 256 weights, each with its scales before or after the codes; rows of
`PackedWeights` have all codes first, in the order of the weights. The numbers do not change: 4-bit codes are reordered,
6-bit scales become a byte each. Sources: ggml-quants.c and ggml-common.h of llama.cpp; ``gguf.quants`` is the reference
in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch

from moeoffload.formats import mxfp4
from moeoffload.formats.int4 import SIGNED, UNSIGNED
from moeoffload.formats.packed import Codes, Offsets, PackedFormat, Scales

Parts = dict[str, torch.Tensor]
"""Sections of packed rows by name: uint8, the bytes of each block (..., n_blocks, bytes) or of each row (...,
bytes)."""

# MXFP4 without a negative zero.
_MXFP4: Final = replace(mxfp4.FORMAT, levels=tuple(level + 0.0 for level in mxfp4.FORMAT.levels or ()))
_IQ4_LEVELS: Final = tuple(
    float(level) for level in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
)
_AT_ONCE: Final = 1 << 18  # bytes of blocks converted at a time: intermediate results stay in a core's cache


@dataclass(frozen=True, slots=True)
class BlockType:
    """One of GGUF's types.

    Attributes:
        n_weights: weights of a block.
        n_bytes: bytes of a block in a file.
        format: format in memory.
        split: splits blocks (..., n_blocks, n_bytes) uint8 into the sections of packed rows.
    """

    n_weights: int
    n_bytes: int
    format: PackedFormat
    split: Callable[[torch.Tensor], Parts]


def split_rows(rows: torch.Tensor, kind: BlockType) -> Parts:
    """Splits rows of a file, (n, bytes) uint8, into their sections, (n, bytes) uint8, see `PackedFormat.sections`."""
    step = max(1, _AT_ONCE // rows.shape[-1])
    pieces = [
        {name: part.flatten(-2) for name, part in kind.split(piece.unflatten(-1, (-1, kind.n_bytes))).items()}
        for piece in rows.split(step)
    ]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _floats(blocks: torch.Tensor) -> Parts:
    return {"codes": blocks}


def _q8_0(blocks: torch.Tensor) -> Parts:
    return {"scales": blocks[..., :2], "codes": blocks[..., 2:]}


def _q4_0(blocks: torch.Tensor) -> Parts:
    return {"scales": blocks[..., :2], "codes": _in_order(blocks[..., 2:], 16)}


def _q5_0(blocks: torch.Tensor) -> Parts:
    zeros = torch.full_like(blocks[..., :1], 16)
    codes = _in_order(blocks[..., 6:], 16)
    return {"scales": blocks[..., :2], "high": blocks[..., 2:6], "codes": codes, "offsets": zeros}


def _mxfp4(blocks: torch.Tensor) -> Parts:
    return {"scales": blocks[..., :1], "codes": _in_order(blocks[..., 1:], 16)}


def _q4_k(blocks: torch.Tensor) -> Parts:
    return _factors(blocks) | {"codes": _in_order(blocks[..., 16:], 32)}


def _q5_k(blocks: torch.Tensor) -> Parts:
    high = _transpose_bits(blocks[..., 16:48].contiguous().view(torch.int64))
    high = high.view(torch.uint8).unflatten(-1, (4, 8)).transpose(-1, -2).flatten(-2)
    return _factors(blocks) | {"codes": _in_order(blocks[..., 48:], 32), "high": high}


def _q6_k(blocks: torch.Tensor) -> Parts:
    high = _transpose_pairs(blocks[..., 128:192].contiguous().view(torch.int32))
    high = high.view(torch.uint8).unflatten(-1, (2, 8, 4)).transpose(-1, -2).flatten(-3)
    return {
        "codes": _in_order(blocks[..., :128], 64),
        "high": high,
        "scales": blocks[..., 192:208],
        "factors": blocks[..., 208:],
    }


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[..., 2:4].unsqueeze(-1) >> shifts) & 3).flatten(-2)
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), dim=-1).flatten(-2)
    scales = (low | high << 4) - 32  # wraps around and is read as a signed byte
    return {"factors": blocks[..., :2], "scales": scales, "codes": _in_order(blocks[..., 8:], 16)}


def _factors(blocks: torch.Tensor) -> Parts:
    """Splits the first 16 bytes of Q4_K and Q5_K: two float16 factors, then eight 6-bit scales and eight offsets."""
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    return {
        "factors": blocks[..., :2],
        "min_factors": blocks[..., 2:4],
        "scales": torch.cat((first & 63, (rest & 15) | (first >> 2 & 48)), dim=-1),
        "offsets": torch.cat((second & 63, (rest >> 4) | (second >> 2 & 48)), dim=-1),
    }


def _in_order(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Reorders 4-bit codes, (..., n) uint8, so that neighbouring codes share a byte, the first in the low half.

    In the input, of each ``width`` bytes the low halves are the first ``width`` codes and the high halves the next.
    """
    pairs = codes.contiguous().view(torch.int16).unflatten(-1, (-1, width // 2))
    low, high = (pairs & 15) | (pairs >> 4 & 240), (pairs >> 4 & 15) | (pairs >> 8 & 240)
    return torch.cat((low, high), dim=-1).to(torch.uint8).flatten(-2)


def _transpose_bits(words: torch.Tensor) -> torch.Tensor:
    """Transposes 8 bytes of 8 bits in each int64: bit b of byte a goes to bit a of byte b (Hacker's Delight, 7-3)."""
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        swapped = (words ^ words >> shift) & mask
        words = words ^ swapped ^ swapped << shift
    return words


def _transpose_pairs(words: torch.Tensor) -> torch.Tensor:
    """Transposes the 4 bytes of 4 pairs of bits in each int32, as `_transpose_bits` does bits."""
    for shift, mask in ((6, 0x00CC00CC), (12, 0x0000F0F0)):
        swapped = (words ^ words >> shift) & mask
        words = words ^ swapped ^ swapped << shift
    return words


def _k_quant(name: str, codes: Codes, group: int, levels: tuple[float, ...] | None = None) -> PackedFormat:
    offsets = Offsets.MIN if name in ("q4_k", "q5_k") else Offsets.NONE
    return PackedFormat(name, codes, Scales.SUPER, offsets, group, levels)


BLOCK_TYPES: Final = {
    "F32": BlockType(1, 4, PackedFormat("f32", Codes.FLOAT32), _floats),
    "F16": BlockType(1, 2, PackedFormat("f16", Codes.FLOAT16), _floats),
    "BF16": BlockType(1, 2, PackedFormat("bf16", Codes.BFLOAT16), _floats),
    "Q8_0": BlockType(32, 34, PackedFormat("q8_0", Codes.INT8, Scales.F16, group=32), _q8_0),
    "Q4_0": BlockType(32, 18, PackedFormat("q4_0", Codes.LEVELS4, Scales.F16, group=32, levels=SIGNED), _q4_0),
    # llama.cpp uses Q5_0 in place of Q4_K for rows whose length is not a multiple of 256.
    "Q5_0": BlockType(32, 22, PackedFormat("q5_0", Codes.UINT5, Scales.F16, Offsets.ZERO, 32), _q5_0),
    "IQ4_NL": BlockType(32, 18, PackedFormat("iq4_nl", Codes.LEVELS4, Scales.F16, group=32, levels=_IQ4_LEVELS), _q4_0),
    "MXFP4": BlockType(32, 17, _MXFP4, _mxfp4),
    "Q4_K": BlockType(256, 144, _k_quant("q4_k", Codes.LEVELS4, 32, UNSIGNED), _q4_k),
    "Q5_K": BlockType(256, 176, _k_quant("q5_k", Codes.UINT5, 32), _q5_k),
    "Q6_K": BlockType(256, 210, _k_quant("q6_k", Codes.INT6, 16), _q6_k),
    "IQ4_XS": BlockType(256, 136, _k_quant("iq4_xs", Codes.LEVELS4, 32, _IQ4_LEVELS), _iq4_xs),
}
"""The supported types by their names in ggml; weights of other types are not kept packed."""
