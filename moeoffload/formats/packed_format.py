"""How rows of packed weights lie in memory: codes, then their scales, read once from front to back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch

SUPER_GROUP: Final = 256
"""Weights that share one float16 factor of `Scales.SUPER`."""
_WORD_BYTES: Final = 4


class Codes(IntEnum):
    """What is stored for each weight, and its value.

    FP8 is e4m3 (OCP), INT8 two's complement, LEVELS4 the number of one of 16 levels, UINT5 0 to 31, INT6 0 to 63
    standing for -32 to 31; FLOAT* are plain weights without scales.
    """

    FP8 = 0
    INT8 = 1
    LEVELS4 = 2
    UINT5 = 3
    INT6 = 4
    BFLOAT16 = 5
    FLOAT16 = 6
    FLOAT32 = 7


class Scales(IntEnum):
    """How the scale of a group is stored; E8M0 is a power of two, 127 being 1 (OCP MX).

    SUPER is a float16 factor for 256 weights times a signed byte for each group (GGUF's k-quants).
    """

    NONE = 0
    F32 = 1
    F16 = 2
    BF16 = 3
    E8M0 = 4
    SUPER = 5


class Offsets(IntEnum):
    """What is added: nothing, -zero * scale with a byte per group, or, with SUPER, -factor * byte of the group."""

    NONE = 0
    ZERO = 1
    MIN = 2


_SCALE_BYTES: Final = {Scales.F32: 4, Scales.F16: 2, Scales.BF16: 2, Scales.E8M0: 1, Scales.SUPER: 1}
PLAIN_CODES: Final = {Codes.BFLOAT16: torch.bfloat16, Codes.FLOAT16: torch.float16, Codes.FLOAT32: torch.float32}
SCALE_DTYPES: Final = {Scales.F32: torch.float32, Scales.F16: torch.float16, Scales.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a row of weights lies in memory.

    Attributes:
        name: as users know it (``"mxfp4"``, ``"q4_k"``).
        codes: what is stored for each weight.
        scales: how scales are stored.
        offsets: what is added.
        group: neighbouring weights of a row that share a scale (a multiple of 16); 0: the whole row.
        levels: values of LEVELS4, 16 of them, exact in bfloat16.
        shared_rows: 1: each row is followed by its scales. More: so many rows share scales of float32, which lie
            beside the weights (`PackedWeights.scales`).
    """

    name: str
    codes: Codes
    scales: Scales = Scales.NONE
    offsets: Offsets = Offsets.NONE
    group: int = 0
    levels: tuple[float, ...] | None = None
    shared_rows: int = 1

    def n_groups(self, n_in: int) -> int:
        """Groups of a row."""
        return -(-n_in // self.group) if self.group else 1

    def sections(self, n_in: int) -> dict[str, slice]:
        """Where the parts of a row lie, in bytes, in their order.

        ``codes``: 8 bits each, or 4 bits each (the first of two in the low half), of 5 and 6 bits the low 4.
        ``high``: the high 1 or 2 bits of those, the first in the lowest bits of a byte.
        ``factors`` and ``min_factors``: float16 for each 256 weights; ``scales``: one for each group, without them of
        the type of ``self.scales``; ``offsets``: a byte for each group.
        """
        n_groups, n_super = self.n_groups(n_in), -(-n_in // SUPER_GROUP)
        sizes = {"codes": n_in * PLAIN_CODES[self.codes].itemsize if self.codes in PLAIN_CODES else n_in}
        if self.codes in (Codes.LEVELS4, Codes.UINT5, Codes.INT6):
            sizes["codes"] = -(-n_in // 2)
        if self.codes in (Codes.UINT5, Codes.INT6):
            sizes["high"] = -(-n_in // (8 if self.codes is Codes.UINT5 else 4))
        if self.scales is Scales.SUPER:
            sizes["factors"] = 2 * n_super
            if self.offsets is Offsets.MIN:
                sizes["min_factors"] = 2 * n_super
        if self.scales is not Scales.NONE and self.shared_rows == 1:
            sizes["scales"] = n_groups * _SCALE_BYTES[self.scales]
        if self.offsets is not Offsets.NONE:
            sizes["offsets"] = n_groups
        places, start = {}, 0
        for name, size in sizes.items():
            places[name] = slice(start, start + size)
            start += size
        return places

    def row_bytes(self, n_in: int) -> int:
        """Bytes of a row with its scales, but for shared ones.

        With codes it is a multiple of 4, up to three bytes at its end are zero: GPUs copy only whole, aligned words
        without waiting for them, and without this rows of Q6_K or MXFP4 of many models would begin between two.
        """
        n_bytes = self.used_bytes(n_in)
        return n_bytes if self.codes in PLAIN_CODES else -(-n_bytes // _WORD_BYTES) * _WORD_BYTES

    def used_bytes(self, n_in: int) -> int:
        """Those without what fills the last word."""
        return max(place.stop for place in self.sections(n_in).values())

    def n_bytes(self, n_out: int, n_in: int) -> int:
        """Bytes of a matrix with its scales."""
        shared = -(-n_out // self.shared_rows) * self.n_groups(n_in) * 4 if self.shared_rows > 1 else 0
        return n_out * self.row_bytes(n_in) + shared
