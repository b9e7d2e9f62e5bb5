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
from moeoffload.formats.conversion import convert
from moeoffload.formats.int4 import SIGNED, UNSIGNED
from moeoffload.formats.packed import Codes, Offsets, PackedFormat, Scales

# MXFP4 without a negative zero.
_MXFP4: Final = replace(mxfp4.FORMAT, levels=tuple(level + 0.0 for level in mxfp4.FORMAT.levels or ()))
_IQ4_LEVELS: Final = tuple(
    float(level) for level in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
)
_AT_ONCE: Final = 1 << 18  # bytes of blocks converted at a time: intermediate results stay in a core's cache
_BITS: Final = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))  # 8 bytes of 8 bits
_PAIRS: Final = ((6, 0x00CC00CC), (12, 0x0000F0F0))  # 4 bytes of 4 pairs


@dataclass(frozen=True, slots=True)
class Section:
    """How blocks become one section of packed rows.

    Attributes:
        function: of ``sections.c``.
        numbers: its numbers behind the bytes of a block.
        size: bytes of the section for each block.
        split: what it does, with torch: maps blocks (..., n_blocks, n_bytes) uint8 to (..., n_blocks, size).
    """

    function: str
    numbers: tuple[int, ...]
    size: int
    split: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class BlockType:
    """One of GGUF's types.

    Attributes:
        n_weights: weights of a block.
        n_bytes: bytes of a block in a file.
        format: format in memory.
        sections: the sections of packed rows by name, see `PackedFormat.sections`.
    """

    n_weights: int
    n_bytes: int
    format: PackedFormat
    sections: dict[str, Section]


def split_rows(rows: torch.Tensor, kind: BlockType) -> dict[str, torch.Tensor]:
    """Splits rows of a file, (n, bytes) uint8, into their sections, (n, bytes) uint8, see `PackedFormat.sections`."""
    blocks = rows.unflatten(-1, (-1, kind.n_bytes))
    n_rows, n_blocks, _ = blocks.shape
    step = max(1, _AT_ONCE // rows.shape[-1])
    found = {}
    for name, section in kind.sections.items():
        shape, numbers = (n_rows, n_blocks * section.size), (n_rows * n_blocks, kind.n_bytes, *section.numbers)
        values = convert(section.function, rows, shape, *numbers)
        if values is None:
            values = torch.cat([section.split(some).flatten(-2) for some in blocks.split(step)])
        found[name] = values
    return found


def _bytes(start: int, size: int) -> Section:
    return Section("moe_block_bytes", (start, size), size, lambda blocks: blocks[..., start : start + size])


def _codes(start: int, size: int, width: int) -> Section:
    return Section(
        *("moe_block_codes", (start, size, width), size),
        lambda blocks: _in_order(blocks[..., start : start + size], width),
    )


def _zeros(value: int) -> Section:
    return Section("moe_block_fill", (value,), 1, lambda blocks: torch.full_like(blocks[..., :1], value))


def _high_bits(blocks: torch.Tensor) -> torch.Tensor:
    high = _transpose(blocks[..., 16:48].contiguous().view(torch.int64), _BITS)
    return high.view(torch.uint8).unflatten(-1, (4, 8)).transpose(-1, -2).flatten(-2)


def _high_pairs(blocks: torch.Tensor) -> torch.Tensor:
    high = _transpose(blocks[..., 128:192].contiguous().view(torch.int32), _PAIRS)
    return high.view(torch.uint8).unflatten(-1, (2, 8, 4)).transpose(-1, -2).flatten(-3)


def _signed_sixes(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[..., 2:4].unsqueeze(-1) >> shifts) & 3).flatten(-2)
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), dim=-1).flatten(-2)
    return (low | high << 4) - 32  # wraps around and is read as a signed byte


def _sixes(start: int, shift: int) -> Section:
    def split(blocks: torch.Tensor) -> torch.Tensor:
        first, rest = blocks[..., start : start + 4], blocks[..., 12:16]
        return torch.cat((first & 63, (rest >> shift & 15) | (first >> 2 & 48)), dim=-1)

    return Section("moe_block_sixes", (start, 12, shift), 8, split)


def _in_order(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Reorders 4-bit codes, (..., n) uint8, so that neighbouring codes share a byte, the first in the low half.

    In the input, of each ``width`` bytes the low halves are the first ``width`` codes and the high halves the next.
    """
    pairs = codes.contiguous().view(torch.int16).unflatten(-1, (-1, width // 2))
    low, high = (pairs & 15) | (pairs >> 4 & 240), (pairs >> 4 & 15) | (pairs >> 8 & 240)
    return torch.cat((low, high), dim=-1).to(torch.uint8).flatten(-2)


def _transpose(words: torch.Tensor, swaps: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Transposes the square of bits, or pairs of bits, in each word: the one at b of byte a goes to a of byte b.

    Each of ``swaps`` exchanges the bits of a mask with those that many places higher (Hacker's Delight, 7-3).
    """
    for shift, mask in swaps:
        swapped = (words ^ words >> shift) & mask
        words = words ^ swapped ^ swapped << shift
    return words


def _k_quant(name: str, codes: Codes, group: int, levels: tuple[float, ...] | None = None) -> PackedFormat:
    offsets = Offsets.MIN if name in ("q4_k", "q5_k") else Offsets.NONE
    return PackedFormat(name, codes, Scales.SUPER, offsets, group, levels)


_Q4_0: Final = {"scales": _bytes(0, 2), "codes": _codes(2, 16, 16)}
_K_SCALES: Final = {
    "factors": _bytes(0, 2),
    "min_factors": _bytes(2, 2),
    "scales": _sixes(4, 0),
    "offsets": _sixes(8, 4),
}
_Q5_0: Final = {"scales": _bytes(0, 2), "high": _bytes(2, 4), "codes": _codes(6, 16, 16), "offsets": _zeros(16)}
_Q5_K: Final = _K_SCALES | {"high": Section("moe_block_bits", (16,), 32, _high_bits), "codes": _codes(48, 128, 32)}
_Q6_K: Final = {
    "codes": _codes(0, 128, 64),
    "high": Section("moe_block_pairs", (128,), 64, _high_pairs),
    "scales": _bytes(192, 16),
    "factors": _bytes(208, 2),
}
_IQ4_XS: Final = {
    "factors": _bytes(0, 2),
    "scales": Section("moe_block_signed", (2,), 8, _signed_sixes),
    "codes": _codes(8, 128, 16),
}
BLOCK_TYPES: Final = {
    "F32": BlockType(1, 4, PackedFormat("f32", Codes.FLOAT32), {"codes": _bytes(0, 4)}),
    "F16": BlockType(1, 2, PackedFormat("f16", Codes.FLOAT16), {"codes": _bytes(0, 2)}),
    "BF16": BlockType(1, 2, PackedFormat("bf16", Codes.BFLOAT16), {"codes": _bytes(0, 2)}),
    "Q8_0": BlockType(
        32, 34, PackedFormat("q8_0", Codes.INT8, Scales.F16, group=32), {"scales": _bytes(0, 2), "codes": _bytes(2, 32)}
    ),
    "Q4_0": BlockType(32, 18, PackedFormat("q4_0", Codes.LEVELS4, Scales.F16, group=32, levels=SIGNED), _Q4_0),
    # llama.cpp uses Q5_0 in place of Q4_K for rows whose length is not a multiple of 256.
    "Q5_0": BlockType(32, 22, PackedFormat("q5_0", Codes.UINT5, Scales.F16, Offsets.ZERO, 32), _Q5_0),
    "IQ4_NL": BlockType(32, 18, PackedFormat("iq4_nl", Codes.LEVELS4, Scales.F16, group=32, levels=_IQ4_LEVELS), _Q4_0),
    "MXFP4": BlockType(32, 17, _MXFP4, {"scales": _bytes(0, 1), "codes": _codes(1, 16, 16)}),
    "Q4_K": BlockType(
        256, 144, _k_quant("q4_k", Codes.LEVELS4, 32, UNSIGNED), _K_SCALES | {"codes": _codes(16, 128, 32)}
    ),
    "Q5_K": BlockType(256, 176, _k_quant("q5_k", Codes.UINT5, 32), _Q5_K),
    "Q6_K": BlockType(256, 210, _k_quant("q6_k", Codes.INT6, 16), _Q6_K),
    "IQ4_XS": BlockType(256, 136, _k_quant("iq4_xs", Codes.LEVELS4, 32, _IQ4_LEVELS), _IQ4_XS),
}
"""The supported types by their names in ggml; weights of other types are not kept packed."""
