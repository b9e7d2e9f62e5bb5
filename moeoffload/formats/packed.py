"""Packed weights in memory: rows of codes, each followed by its scales, so that a row is one sequential read.

A weight is ``value(code) * scale`` with the format's offset (see `Offsets`), computed in float32 and rounded to the
compute dtype: the same number that the format's reference unpacks to. Kernels (``kernels/cpu/unpack.h``) and
`PackedWeights.unpack` read the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from moeoffload.formats.packed_format import (
    PLAIN_CODES,
    SCALE_DTYPES,
    SUPER_GROUP,
    Codes,
    Offsets,
    PackedFormat,
    Scales,
)
from moeoffload.formats.tiles import TILE_ROWS, make_tiles, read_tiles, write_tiles
from moeoffload.huge_pages import empty_weights

__all__ = ["SUPER_GROUP", "Codes", "Offsets", "PackedFormat", "PackedWeights", "Scales"]

_MOST_AT_ONCE: Final = 1 << 22  # weights unpacked at a time: 16 MiB of float32, and intermediate results


@dataclass(slots=True, eq=False)
class PackedWeights:
    """One packed matrix of each held expert of a layer, all in the same format.

    Attributes:
        format: how they are packed.
        n_in: weights of a row.
        data: (n_experts, n_out, row_bytes) uint8, contiguous.
        scales: (n_experts, ceil(n_out / shared_rows), n_groups) float32 if rows share scales, else None.
        in_tiles: whether ``data`` is in tiles of 16 rows, see `moeoffload.formats.tiles`.
    """

    format: PackedFormat
    n_in: int
    data: torch.Tensor
    scales: torch.Tensor | None = None
    in_tiles: bool = False

    @classmethod
    def empty(
        cls,
        form: PackedFormat,
        n_experts: int,
        n_out: int,
        n_in: int,
        device: torch.device,
        *,
        in_tiles: bool = False,
    ) -> PackedWeights:
        """Allocates uninitialised weights, to be written through `section` or by `write_rows`."""
        data = empty_weights((n_experts, n_out, form.row_bytes(n_in)), torch.uint8, device)
        if not in_tiles:
            data[..., form.used_bytes(n_in) :] = 0
        if form.shared_rows == 1:
            return cls(form, n_in, data, in_tiles=in_tiles)
        shape = n_experts, -(-n_out // form.shared_rows), form.n_groups(n_in)
        return cls(form, n_in, data, torch.empty(shape, dtype=torch.float32, device=device), in_tiles)

    @property
    def shape(self) -> torch.Size:
        """(n_experts, n_out, n_in)."""
        return torch.Size((*self.data.shape[:2], self.n_in))

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and their scales."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def section(self, name: str) -> torch.Tensor:
        """Returns a view of a section of all rows, (n_experts, n_out, bytes) uint8; see `PackedFormat.sections`."""
        assert not self.in_tiles, "rows in tiles have no sections"
        return self.data[..., self.format.sections(self.n_in)[name]]

    def write_rows(self, expert: int, rows: slice | torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """Writes ``rows`` of an expert from their sections ``parts``, (n, bytes) uint8; in tiles only whole tiles."""
        if self.in_tiles:
            write_tiles(self.format, self.n_in, parts, self.data[expert, rows])
            return
        for name, values in parts.items():
            self.section(name)[expert, rows] = values

    def __getitem__(self, experts: slice | torch.Tensor) -> PackedWeights:
        """Returns some experts; a view if ``experts`` is a slice."""
        scales = None if self.scales is None else self.scales[experts]
        return replace(self, data=self.data[experts], scales=scales)

    def one(self, expert: int) -> PackedWeights:
        """Returns a view of one expert, (1, n_out, n_in)."""
        return self[expert : expert + 1]

    def take(self, expert: int) -> PackedWeights:
        """Returns a copy of one expert, (1, n_out, n_in), on the CPU."""
        one = self.one(expert)
        scales = None if one.scales is None else one.scales.to("cpu", copy=True)
        return replace(one, data=one.data.to("cpu", copy=True), scales=scales)

    def put(self, expert: int, one: PackedWeights) -> None:
        """Writes one expert from ``one``, of the same shape and format; if only one of the two is in tiles, both must
        be on the CPU."""
        if one.in_tiles == self.in_tiles:
            self.data[expert].copy_(one.data[0])
        elif self.in_tiles:
            places = self.format.sections(self.n_in)
            self.write_rows(expert, slice(None), {name: one.data[0, :, place] for name, place in places.items()})
        else:
            self.data[expert].copy_(read_tiles(self.format, self.n_in, one.data[0]))
        if self.scales is not None and one.scales is not None:
            self.scales[expert].copy_(one.scales[0])

    def unpack(self, dtype: torch.dtype, experts: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Returns the weights of ``experts`` as (n, n_out, n_in) of ``dtype``, the values that kernels compute with.

        This is the fallback if no kernel supports the format.
        """
        chosen = self[experts]
        n_experts, n_out, n_in = chosen.shape
        out = torch.empty((n_experts, n_out, n_in), dtype=dtype, device=self.device)
        step = max(1, _MOST_AT_ONCE // max(1, n_in))
        step = -(-step // self._together) * self._together
        for expert in range(n_experts):
            for start in range(0, n_out, step):
                out[expert, start : start + step] = chosen._floats(expert, start, min(start + step, n_out))
        return out

    def row(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns one row of the first matrix, (n_in) of ``dtype``."""
        start = number // self._together * self._together
        return self._floats(0, start, min(start + self._together, self.shape[1]))[number - start].to(dtype)

    @property
    def _together(self) -> int:
        """Number of neighbouring rows that can only be read together."""
        return TILE_ROWS if self.in_tiles else 1

    def lay_tiles(self) -> None:
        """Converts the rows to tiles in place, if they are not in tiles yet; `tiles.can_tile` must allow it."""
        if not self.in_tiles:
            make_tiles(self.format, self.n_in, self.data)
            self.in_tiles = True

    def _floats(self, expert: int, start: int, end: int) -> torch.Tensor:
        """Returns rows of one expert, (end - start, n_in) float32; ``start`` is a multiple of `_together`."""
        form, n_in = self.format, self.n_in
        rows = self.data[expert, start:end]
        if self.in_tiles:
            rows = read_tiles(form, n_in, rows)
        parts = {name: rows[:, place] for name, place in form.sections(n_in).items()}
        if form.codes in PLAIN_CODES:
            return parts["codes"].contiguous().view(PLAIN_CODES[form.codes]).float()
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
        """Returns scales and the offsets to subtract (or None), (rows, n_groups) float32 each."""
        form = self.format
        if self.scales is not None:
            rows = torch.arange(start, end, device=self.device) // form.shared_rows
            return self.scales[expert, rows], None
        offsets = parts["offsets"].float() if form.offsets is not Offsets.NONE else None
        scales = parts["scales"].contiguous().view(SCALE_DTYPES[form.scales]).float()
        if form.scales is not Scales.SUPER:
            return scales, offsets
        per_factor = SUPER_GROUP // form.group

        def factors(name: str) -> torch.Tensor:
            each = parts[name].contiguous().view(torch.float16).float()
            return each.repeat_interleave(per_factor, dim=-1)[:, : scales.shape[-1]]

        if offsets is not None:
            offsets = factors("min_factors") * offsets
        return factors("factors") * scales, offsets


def _values(form: PackedFormat, parts: dict[str, torch.Tensor], n_in: int) -> torch.Tensor:
    """Returns the values of codes before scaling, (rows, n_in) float32."""
    codes = parts["codes"].contiguous()
    if form.codes is Codes.FP8:
        return codes.view(torch.float8_e4m3fn).float()
    if form.codes is Codes.INT8:
        return codes.view(torch.int8).float()
    low = split_fields(codes, 4)[:, :n_in]
    if form.codes is Codes.LEVELS4:
        return torch.tensor(form.levels, dtype=torch.float32, device=codes.device)[low.long()]
    n_bits = 1 if form.codes is Codes.UINT5 else 2
    whole = low | split_fields(parts["high"], n_bits)[:, :n_in] << 4
    return whole.float() - (32 if form.codes is Codes.INT6 else 0)


def split_fields(packed: torch.Tensor, n_bits: int) -> torch.Tensor:
    """Splits (..., bytes) into (..., bytes * 8 / n_bits) uint8: fields of ``n_bits``, lowest bits first."""
    shifts = torch.arange(0, 8, n_bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << n_bits) - 1)).flatten(-2)
