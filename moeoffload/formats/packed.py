"""Packed weights in memory: rows of codes, each followed by its scales, read once from front to back.

A weight is ``value(code) * scale + offset``, computed in float32 and rounded to the compute dtype: the same number that
the format's reference unpacks to. Kernels (``kernels/cpu/unpack.h``) and `PackedWeights.unpack` read the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch

from moeoffload.huge_pages import empty_weights

SUPER_GROUP: Final = 256
"""Weights that share one float16 factor of `Scales.SUPER`."""
_WORD_BYTES: Final = 4
_MOST_AT_ONCE: Final = 1 << 22  # weights unpacked at a time: some tens of MiB of float32


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
_PLAIN: Final = {Codes.BFLOAT16: torch.bfloat16, Codes.FLOAT16: torch.float16, Codes.FLOAT32: torch.float32}
_SCALE_DTYPES: Final = {Scales.F32: torch.float32, Scales.F16: torch.float16, Scales.BF16: torch.bfloat16}


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
        sizes = {"codes": n_in * _PLAIN[self.codes].itemsize if self.codes in _PLAIN else n_in}
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
        n_bytes = self._used_bytes(n_in)
        return n_bytes if self.codes in _PLAIN else -(-n_bytes // _WORD_BYTES) * _WORD_BYTES

    def _used_bytes(self, n_in: int) -> int:
        return max(place.stop for place in self.sections(n_in).values())

    def n_bytes(self, n_out: int, n_in: int) -> int:
        """Bytes of a matrix with its scales."""
        shared = -(-n_out // self.shared_rows) * self.n_groups(n_in) * 4 if self.shared_rows > 1 else 0
        return n_out * self.row_bytes(n_in) + shared


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """Matrices of one format, of all experts of a layer that are held.

    Attributes:
        format: how they are packed.
        n_in: weights of a row.
        data: (n_experts, n_out, row_bytes) uint8, contiguous.
        scales: (n_experts, ceil(n_out / shared_rows), n_groups) float32, if rows share them.
    """

    format: PackedFormat
    n_in: int
    data: torch.Tensor
    scales: torch.Tensor | None = None

    @classmethod
    def empty(cls, form: PackedFormat, n_experts: int, n_out: int, n_in: int, device: torch.device) -> PackedWeights:
        """Room for weights; `section` says where to write them."""
        data = empty_weights((n_experts, n_out, form.row_bytes(n_in)), torch.uint8, device)
        data[..., form._used_bytes(n_in) :] = 0
        if form.shared_rows == 1:
            return cls(form, n_in, data)
        shape = n_experts, -(-n_out // form.shared_rows), form.n_groups(n_in)
        return cls(form, n_in, data, torch.empty(shape, dtype=torch.float32, device=device))

    @property
    def shape(self) -> torch.Size:
        """(n_experts, n_out, n_in)."""
        return torch.Size((*self.data.shape[:2], self.n_in))

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of all of them with their scales."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def section(self, name: str) -> torch.Tensor:
        """A part of all rows, (n_experts, n_out, bytes) uint8, to read or to write; see `PackedFormat.sections`."""
        return self.data[..., self.format.sections(self.n_in)[name]]

    def unpack(self, dtype: torch.dtype, experts: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Weights of ``experts`` as (n, n_out, n_in) of ``dtype``: what kernels compute with.

        This is the fallback where there is no kernel for the format.
        """
        chosen = PackedWeights(
            self.format, self.n_in, self.data[experts], None if self.scales is None else self.scales[experts]
        )
        n_experts, n_out, n_in = chosen.shape
        out = torch.empty((n_experts, n_out, n_in), dtype=dtype, device=self.device)
        step = max(1, _MOST_AT_ONCE // max(1, n_in))
        step = -(-step // self.format.shared_rows) * self.format.shared_rows
        for expert in range(n_experts):
            for start in range(0, n_out, step):
                out[expert, start : start + step] = chosen._floats(expert, start, min(start + step, n_out))
        return out

    def row(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """One row of the first matrix, (n_in) of ``dtype``."""
        start = number // self.format.shared_rows * self.format.shared_rows
        return self._floats(0, start, number + 1)[number - start].to(dtype)

    def _floats(self, expert: int, start: int, end: int) -> torch.Tensor:
        """Rows of one expert, (end - start, n_in) float32; ``start`` is a multiple of the rows that share scales."""
        form, n_in = self.format, self.n_in
        parts = {name: self.data[expert, start:end, place] for name, place in form.sections(n_in).items()}
        if form.codes in _PLAIN:
            return parts["codes"].contiguous().view(_PLAIN[form.codes]).float()
        values = _values(form, parts, n_in)
        scales, offsets = self._scales(expert, start, end, parts)
        repeats = min(form.group or n_in, n_in)  # a file may claim groups of any size

        def spread(each: torch.Tensor) -> torch.Tensor:
            return each.repeat_interleave(repeats, dim=-1)[..., :n_in]

        if offsets is None:
            return values * spread(scales)
        if form.offsets is Offsets.ZERO:
            return (values - spread(offsets)) * spread(scales)
        return values * spread(scales) - spread(offsets)

    def _scales(
        self, expert: int, start: int, end: int, parts: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and what to subtract, (rows, n_groups) float32."""
        form = self.format
        if self.scales is not None:
            rows = torch.arange(start, end, device=self.device) // form.shared_rows
            return self.scales[expert, rows], None
        offsets = parts["offsets"].float() if form.offsets is not Offsets.NONE else None
        raw = parts["scales"].contiguous()
        if form.scales is Scales.E8M0:
            return raw.view(torch.float8_e8m0fnu).float(), offsets
        if form.scales is not Scales.SUPER:
            return raw.view(_SCALE_DTYPES[form.scales]).float(), offsets
        per_factor = SUPER_GROUP // form.group

        def factors(name: str) -> torch.Tensor:
            each = parts[name].contiguous().view(torch.float16).float()
            return each.repeat_interleave(per_factor, dim=-1)[:, : raw.shape[-1]]

        if offsets is not None:
            offsets = factors("min_factors") * offsets
        return factors("factors") * raw.view(torch.int8).float(), offsets


def _values(form: PackedFormat, parts: dict[str, torch.Tensor], n_in: int) -> torch.Tensor:
    """Values of codes, (rows, n_in) float32."""
    codes = parts["codes"].contiguous()
    if form.codes is Codes.FP8:
        return codes.view(torch.float8_e4m3fn).float()
    if form.codes is Codes.INT8:
        return codes.view(torch.int8).float()
    low = _fields(codes, 4)[:, :n_in]
    if form.codes is Codes.LEVELS4:
        return torch.tensor(form.levels, dtype=torch.float32, device=codes.device)[low.long()]
    n_bits = 1 if form.codes is Codes.UINT5 else 2
    whole = low | _fields(parts["high"], n_bits)[:, :n_in] << 4
    return whole.float() - (32 if form.codes is Codes.INT6 else 0)


def _fields(packed: torch.Tensor, n_bits: int) -> torch.Tensor:
    """(rows, bytes) -> (rows, bytes * 8 / n_bits) uint8: fields of n_bits, lowest first."""
    shifts = torch.arange(0, 8, n_bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << n_bits) - 1)).flatten(-2)
