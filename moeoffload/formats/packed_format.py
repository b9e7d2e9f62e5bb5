"""The layout of a row of packed weights in memory: codes, then their scales, so that a row is one sequential read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch

SUPER_GROUP: Final = 256
"""Number of weights that share a float16 factor of `Scales.SUPER`."""
_WORD_BYTES: Final = 4


class Codes(IntEnum):
    """The code stored for each weight, and its value.

    FP8 is e4m3 (OCP), INT8 two's complement, LEVELS4 an index into 16 levels, UINT5 0 to 31, INT6 0 to 63 for values
    of -32 to 31; BFLOAT16 and FLOAT* are plain weights without scales.
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
    """How the scale of a group is stored; E8M0 is a power of two, 2^(byte - 127) (OCP MX).

    SUPER is a float16 factor for each 256 weights times a signed byte for each group (GGUF's k-quants).
    """

    NONE = 0
    F32 = 1
    F16 = 2
    BF16 = 3
    E8M0 = 4
    SUPER = 5


class Offsets(IntEnum):
    """Offset added to scaled values: NONE; ZERO: -zero * scale, where zero is a byte per group; MIN, only with SUPER:
    -factor * byte of the group, where 256 weights share the float16 factor."""

    NONE = 0
    ZERO = 1
    MIN = 2


PLAIN_CODES: Final = {Codes.BFLOAT16: torch.bfloat16, Codes.FLOAT16: torch.float16, Codes.FLOAT32: torch.float32}
SCALE_DTYPES: Final = {
    Scales.F32: torch.float32,
    Scales.F16: torch.float16,
    Scales.BF16: torch.bfloat16,
    Scales.E8M0: torch.float8_e8m0fnu,
    Scales.SUPER: torch.int8,
}


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """The layout of a row of weights in memory.

    Attributes:
        name: the name that users see (``"mxfp4"``, ``"q4_k"``).
        codes: the kind of code stored for each weight.
        scales: how scales are stored.
        offsets: the kind of offset.
        group: number of neighbouring weights of a row that share a scale (a multiple of 16); 0: the whole row.
        levels: the 16 values of LEVELS4, exact in bfloat16.
        shared_rows: 1: each row is followed by its scales. More: this many rows share float32 scales, which are stored
            apart from the rows (`PackedWeights.scales`).
    """

    name: str
    codes: Codes
    scales: Scales = Scales.NONE
    offsets: Offsets = Offsets.NONE
    group: int = 0
    levels: tuple[float, ...] | None = None
    shared_rows: int = 1

    def n_groups(self, n_in: int) -> int:
        """Returns the number of groups of a row."""
        return -(-n_in // self.group) if self.group else 1

    def sections(self, n_in: int) -> dict[str, slice]:
        """Returns the places of the sections of a row, in bytes, in their order.

        ``codes``: plain weights, 8-bit codes, 4-bit codes (the first of two in the low half), or the low 4 bits of 5-
        and 6-bit codes.
        ``high``: the high 1 or 2 bits of 5- and 6-bit codes, the first in the lowest bits of a byte.
        ``factors`` and ``min_factors``: a float16 for each 256 weights (SUPER).
        ``scales``: one for each group: a signed byte with SUPER, else of the type of ``self.scales``.
        ``offsets``: a byte for each group.
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
            sizes["scales"] = n_groups * SCALE_DTYPES[self.scales].itemsize
        if self.offsets is not Offsets.NONE:
            sizes["offsets"] = n_groups
        places, start = {}, 0
        for name, size in sizes.items():
            places[name] = slice(start, start + size)
            start += size
        return places

    def row_bytes(self, n_in: int) -> int:
        """Returns the bytes of a row with its scales, except shared ones.

        Rows of codes are padded with zeros to a multiple of 4: GPUs copy only whole, aligned words asynchronously, and
        without padding rows of Q6_K or MXFP4 of many models would not be aligned.
        """
        n_bytes = self.used_bytes(n_in)
        return n_bytes if self.codes in PLAIN_CODES else -(-n_bytes // _WORD_BYTES) * _WORD_BYTES

    def used_bytes(self, n_in: int) -> int:
        """Returns the bytes of a row without padding."""
        return max(place.stop for place in self.sections(n_in).values())

    def n_bytes(self, n_out: int, n_in: int) -> int:
        """Returns the bytes of a matrix with its scales."""
        shared = -(-n_out // self.shared_rows) * self.n_groups(n_in) * 4 if self.shared_rows > 1 else 0
        return n_out * self.row_bytes(n_in) + shared


PLAIN: Final = {
    torch.bfloat16: PackedFormat("bf16", Codes.BFLOAT16),
    torch.float16: PackedFormat("f16", Codes.FLOAT16),
    torch.float32: PackedFormat("f32", Codes.FLOAT32),
}
"""The formats of unquantised weights by dtype."""
