"""How Triton programs read packed weights: a tile of codes, unpacked in registers. Importing this needs triton.

The bytes are those of `moeoffload.formats.packed`; the numbers, in float32, are those of `PackedWeights.unpack`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl

from moeoffload.formats.packed import SUPER_GROUP, Codes, Offsets, PackedFormat, PackedWeights, Scales

_FP8: Final = tl.constexpr(int(Codes.FP8))
_INT8: Final = tl.constexpr(int(Codes.INT8))
_LEVELS4: Final = tl.constexpr(int(Codes.LEVELS4))
_UINT5: Final = tl.constexpr(int(Codes.UINT5))
_INT6: Final = tl.constexpr(int(Codes.INT6))
_BFLOAT16: Final = tl.constexpr(int(Codes.BFLOAT16))
_FLOAT16: Final = tl.constexpr(int(Codes.FLOAT16))
_FIRST_PLAIN: Final = tl.constexpr(int(Codes.BFLOAT16))
_NO_SCALES: Final = tl.constexpr(int(Scales.NONE))
_F32: Final = tl.constexpr(int(Scales.F32))
_F16: Final = tl.constexpr(int(Scales.F16))
_BF16: Final = tl.constexpr(int(Scales.BF16))
_E8M0: Final = tl.constexpr(int(Scales.E8M0))
_SUPER: Final = tl.constexpr(int(Scales.SUPER))
_NO_OFFSETS: Final = tl.constexpr(int(Offsets.NONE))
_ZERO: Final = tl.constexpr(int(Offsets.ZERO))
_SUPER_GROUP: Final = tl.constexpr(SUPER_GROUP)
_WHOLE_ROW: Final = 1 << 30


class RowFormat(NamedTuple):
    """A `PackedFormat` for rows of one length, in numbers that a program is compiled for.

    ``group`` is a power of two, larger than any row if a row has one scale. The last six are where the sections of a
    row begin, in bytes.
    """

    codes: int
    scales: int
    offsets: int
    group: int
    n_groups: int
    shared_rows: int
    row_bytes: int
    high_at: int
    factors_at: int
    min_factors_at: int
    scales_at: int
    offsets_at: int


def why_not_packed(form: PackedFormat) -> str | None:
    """Why no program reads such weights; None if one does."""
    return f"groups of {form.group} weights" if form.group & (form.group - 1) else None


def row_format(packed: PackedWeights) -> RowFormat:
    """The format of the rows of ``packed``, for which `why_not_packed` says None."""
    form, sections = packed.format, packed.format.sections(packed.n_in)
    starts = (
        sections[name].start if name in sections else 0
        for name in ("high", "factors", "min_factors", "scales", "offsets")
    )
    return RowFormat(
        int(form.codes),
        int(form.scales),
        int(form.offsets),
        form.group or _WHOLE_ROW,
        form.n_groups(packed.n_in),
        form.shared_rows,
        form.row_bytes(packed.n_in),
        *starts,
    )


@triton.jit
def _fields(
    at: tl.tensor, row_exists: tl.tensor, start: tl.tensor, length: tl.tensor, n_bits: tl.constexpr, depth: tl.constexpr
) -> tl.tensor:
    """Fields ``start`` to ``start + depth`` of ``n_bits`` each, lowest first, of rows of bytes: (depth, rows) int32."""
    n_fields: tl.constexpr = 8 // n_bits
    byte = start // n_fields + tl.arange(0, depth // n_fields)
    exists = (byte * n_fields < length)[:, None] & row_exists[None, :]
    packed = tl.load(at[None, :] + byte[:, None], mask=exists, other=0, eviction_policy="evict_first").to(tl.int32)
    if n_bits == 8:
        return packed
    shift = tl.arange(0, n_fields) * n_bits
    fields = (packed[:, None, :] >> shift[None, :, None]) & ((1 << n_bits) - 1)
    return tl.reshape(fields, (depth, at.shape[0]))


@triton.jit
def _values(
    at: tl.tensor,
    levels: tl.tensor,
    row_exists: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    form: tl.constexpr,
    depth: tl.constexpr,
) -> tl.tensor:
    """What the codes stand for, (depth, rows) float32."""
    if form.codes == _FP8:
        code = _fields(at, row_exists, start, length, 8, depth)
        # The exponent and the fraction move to their places in a float32, whose exponent counts from 120 less.
        value = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * 2.0**120
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    if form.codes == _INT8:
        return _fields(at, row_exists, start, length, 8, depth).to(tl.int8).to(tl.float32)
    code = _fields(at, row_exists, start, length, 4, depth)
    if form.codes == _LEVELS4:
        return tl.load(levels + code)
    if form.codes == _UINT5:
        return (code | (_fields(at + form.high_at, row_exists, start, length, 1, depth) << 4)).to(tl.float32)
    return ((code | (_fields(at + form.high_at, row_exists, start, length, 2, depth) << 4)) - 32).to(tl.float32)


@triton.jit
def _plain(
    at: tl.tensor, row_exists: tl.tensor, start: tl.tensor, length: tl.tensor, dtype: tl.constexpr, depth: tl.constexpr
) -> tl.tensor:
    """Weights that are no codes, (depth, rows) float32."""
    step = start + tl.arange(0, depth)
    exists = (step < length)[:, None] & row_exists[None, :]
    at = at.to(tl.pointer_type(dtype), bitcast=True)
    return tl.load(at[None, :] + step[:, None], mask=exists, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _numbers(
    row_at: tl.tensor,
    section: tl.constexpr,
    index: tl.tensor,
    exists: tl.tensor,
    dtype: tl.constexpr,
    form: tl.constexpr,
) -> tl.tensor:
    """Numbers ``index`` (n,) of a section of the rows that begin at ``row_at`` (rows,): (n, rows) float32."""
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    at = row_at[None, :] + section
    if section % size == 0 and form.row_bytes % size == 0:
        at = at.to(tl.pointer_type(dtype), bitcast=True)
        return tl.load(at + index[:, None], mask=exists, other=0.0).to(tl.float32)
    word: tl.constexpr = tl.uint16 if size == 2 else tl.uint32
    bits = tl.zeros(exists.shape, word)
    for i in tl.static_range(size):  # a GPU reads numbers only from multiples of their size
        bits |= tl.load(at + (index * size + i)[:, None], mask=exists, other=0).to(word) << (8 * i)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _scales(
    at: tl.tensor,
    shared: tl.tensor,
    row: tl.tensor,
    row_exists: tl.tensor,
    start: tl.tensor,
    form: tl.constexpr,
    n: tl.constexpr,
) -> tl.tensor:
    """Scales of ``n`` groups from weight ``start`` on, and what to subtract: (n, rows) float32."""
    group = start // form.group + tl.arange(0, n)
    exists = (group < form.n_groups)[:, None] & row_exists[None, :]
    offset = 0.0
    if form.offsets != _NO_OFFSETS:
        offset = _numbers(at, form.offsets_at, group, exists, tl.uint8, form)
    if form.shared_rows > 1:
        places = shared + (row // form.shared_rows)[None, :] * form.n_groups + group[:, None]
        return tl.load(places, mask=exists, other=0.0), offset
    if form.scales == _F32:
        return _numbers(at, form.scales_at, group, exists, tl.float32, form), offset
    if form.scales == _F16:
        return _numbers(at, form.scales_at, group, exists, tl.float16, form), offset
    if form.scales == _BF16:
        return _numbers(at, form.scales_at, group, exists, tl.bfloat16, form), offset
    if form.scales == _E8M0:
        exponent = tl.load(at[None, :] + form.scales_at + group[:, None], mask=exists, other=0).to(tl.int32)
        bits = tl.where(exponent == 0, 0x00400000, exponent << 23)  # the least is half of the least normal number
        return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True), offset
    super_group = group * form.group // _SUPER_GROUP
    if form.offsets != _NO_OFFSETS:
        offset = _numbers(at, form.min_factors_at, super_group, exists, tl.float16, form) * offset
    factor = _numbers(at, form.factors_at, super_group, exists, tl.float16, form)
    return factor * _numbers(at, form.scales_at, group, exists, tl.int8, form), offset


@triton.jit
def _spread(each: tl.tensor, depth: tl.constexpr) -> tl.tensor:
    """(n, rows) -> (depth, rows), every row of it depth / n times."""
    n: tl.constexpr = each.shape[0]
    n_rows: tl.constexpr = each.shape[1]
    return tl.reshape(tl.broadcast_to(each[:, None, :], (n, depth // n, n_rows)), (depth, n_rows))


@triton.jit
def unpacked(
    data: tl.tensor,
    shared: tl.tensor,
    levels: tl.tensor,
    row: tl.tensor,
    row_exists: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    form: tl.constexpr,
    depth: tl.constexpr,
) -> tl.tensor:
    """Weights ``start`` to ``start + depth`` of rows of one expert: (depth, rows) float32, not rounded.

    Weights beyond ``length`` are any finite numbers, unless scales are not; rows that do not exist are not read.

    data: packed rows; shared: scales that rows share; levels: 16 float32; row, row_exists: (rows,).
    """
    at = data + row.to(tl.int64) * form.row_bytes
    if form.codes >= _FIRST_PLAIN:
        dtype: tl.constexpr = (
            tl.bfloat16 if form.codes == _BFLOAT16 else (tl.float16 if form.codes == _FLOAT16 else tl.float32)
        )
        return _plain(at, row_exists, start, length, dtype, depth)
    values = _values(at, levels, row_exists, start, length, form, depth)
    n_groups: tl.constexpr = depth // form.group if form.group < depth else 1
    scale, offset = _scales(at, shared, row, row_exists, start, form, n_groups)
    scale = _spread(scale, depth)
    if form.offsets == _NO_OFFSETS:
        return values * scale
    if form.offsets == _ZERO:
        return (values - _spread(offset, depth)) * scale
    # The product is exact (11 bits of the factor, 8 of the scale, 5 of the code): fusing changes no bit.
    return values * scale - _spread(offset, depth)
