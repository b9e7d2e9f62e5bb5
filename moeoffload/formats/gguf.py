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
from moeoffload.formats.packed import Codes, Offsets, PackedFormat, Scales, split_fields

# MXFP4 without a negative zero.
_MXFP4: Final = replace(mxfp4.FORMAT, levels=tuple(level + 0.0 for level in mxfp4.FORMAT.levels or ()))
_IQ4_LEVELS: Final = tuple(
    float(level) for level in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
)
_AT_ONCE: Final = 1 << 18  # bytes of blocks converted at a time: intermediate results stay in a core's cache


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
        n_bytes: bytes of a block in a file.
        format: format in memory.
        sections: the sections of packed rows by name, see `PackedFormat.sections`.
    """

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
    return Section("moe_block_codes", (start, size, width), size, _in_order(start, size, width, 4))


def _zeros(value: int) -> Section:
    return Section("moe_block_fill", (value,), 1, lambda blocks: torch.full_like(blocks[..., :1], value))


def _signed_sixes(blocks: torch.Tensor) -> torch.Tensor:
    low, high = split_fields(blocks[..., 4:8], 4), split_fields(blocks[..., 2:4], 2)
    return (low | high << 4) - 32  # wraps around and is read as a signed byte


def _sixes(start: int, shift: int) -> Section:
    def split(blocks: torch.Tensor) -> torch.Tensor:
        first, rest = blocks[..., start : start + 4], blocks[..., 12:16]
        return torch.cat((first & 63, (rest >> shift & 15) | (first >> 2 & 48)), dim=-1)

    return Section("moe_block_sixes", (start, 12, shift), 8, split)


def _in_order(start: int, size: int, width: int, n_bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the `Section.split` that puts neighbouring codes of ``n_bits`` into a byte, the first in its lowest bits.

    In a block, of each ``width`` bytes the lowest bits are the first ``width`` codes, the bits above them the next.
    """
    shifts = range(0, 8, n_bits)

    def split(blocks: torch.Tensor) -> torch.Tensor:
        stored = blocks[..., start : start + size].unflatten(-1, (-1, width))
        codes = torch.stack([stored >> shift & (1 << n_bits) - 1 for shift in shifts], dim=-2).flatten(-3)
        parts = [codes[..., place :: len(shifts)] << shift for place, shift in enumerate(shifts)]
        return torch.stack(parts).sum(0, dtype=torch.uint8)

    return split


_Q4_0: Final = {"scales": _bytes(0, 2), "codes": _codes(2, 16, 16)}
_K_SCALES: Final = {
    "factors": _bytes(0, 2),
    "min_factors": _bytes(2, 2),
    "scales": _sixes(4, 0),
    "offsets": _sixes(8, 4),
}
_Q5_0: Final = {"scales": _bytes(0, 2), "high": _bytes(2, 4), "codes": _codes(6, 16, 16), "offsets": _zeros(16)}
_Q4_K: Final = _K_SCALES | {"codes": _codes(16, 128, 32)}
_Q5_K: Final = _K_SCALES | {
    "high": Section("moe_block_bits", (16,), 32, _in_order(16, 32, 32, 1)),
    "codes": _codes(48, 128, 32),
}
_Q6_K: Final = {
    "codes": _codes(0, 128, 64),
    "high": Section("moe_block_pairs", (128,), 64, _in_order(128, 64, 32, 2)),
    "scales": _bytes(192, 16),
    "factors": _bytes(208, 2),
}
_IQ4_XS: Final = {
    "factors": _bytes(0, 2),
    "scales": Section("moe_block_signed", (2,), 8, _signed_sixes),
    "codes": _codes(8, 128, 16),
}
BLOCK_TYPES: Final = {
    "Q8_0": BlockType(
        34, PackedFormat("q8_0", Codes.INT8, Scales.F16, group=32), {"scales": _bytes(0, 2), "codes": _bytes(2, 32)}
    ),
    "Q4_0": BlockType(18, PackedFormat("q4_0", Codes.LEVELS4, Scales.F16, group=32, levels=SIGNED), _Q4_0),
    # llama.cpp uses Q5_0 in place of Q4_K for rows whose length is not a multiple of 256.
    "Q5_0": BlockType(22, PackedFormat("q5_0", Codes.UINT5, Scales.F16, Offsets.ZERO, 32), _Q5_0),
    "IQ4_NL": BlockType(18, PackedFormat("iq4_nl", Codes.LEVELS4, Scales.F16, group=32, levels=_IQ4_LEVELS), _Q4_0),
    "MXFP4": BlockType(17, _MXFP4, {"scales": _bytes(0, 1), "codes": _codes(1, 16, 16)}),
    "Q4_K": BlockType(144, PackedFormat("q4_k", Codes.LEVELS4, Scales.SUPER, Offsets.MIN, 32, UNSIGNED), _Q4_K),
    "Q5_K": BlockType(176, PackedFormat("q5_k", Codes.UINT5, Scales.SUPER, Offsets.MIN, 32), _Q5_K),
    "Q6_K": BlockType(210, PackedFormat("q6_k", Codes.INT6, Scales.SUPER, group=16), _Q6_K),
    "IQ4_XS": BlockType(
        136, PackedFormat("iq4_xs", Codes.LEVELS4, Scales.SUPER, group=32, levels=_IQ4_LEVELS), _IQ4_XS
    ),
}
"""The supported types by their names in ggml; weights of other types are not kept packed."""
