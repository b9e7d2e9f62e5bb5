"""Reads packed weights in Triton programs: loads a tile of codes and unpacks it in registers. Importing needs triton.

The layout is that of `moeoffload.formats.packed`; the float32 results are those of `PackedWeights.unpack`.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import triton
import triton.language as tl
from triton.language import target_info

from moeoffload.formats.mxfp4 import FORMAT as MXFP4
from moeoffload.formats.packed import SUPER_GROUP, PackedWeights
from moeoffload.kernels.packing import section_starts

_SUPER_GROUP: Final = tl.constexpr(SUPER_GROUP)
_WHOLE_ROW: Final = 1 << 30


class RowFormat(NamedTuple):
    """A `PackedFormat` for rows of one length, as constants that a program is compiled for.

    ``codes``, ``scales`` and ``offsets`` are names of `Codes`, `Scales` and `Offsets`. ``group`` is a power of two,
    larger than any row if a row has one scale; ``*_at`` is the byte where a section of a row begins. Levels of 4-bit
    codes are consecutive numbers from ``first_level``, or E2M1 (OCP MX), or 16 bytes in ``words``, four in each.
    """

    codes: str
    scales: str
    offsets: str
    group: int
    n_groups: int
    shared_rows: int
    n_in: int
    row_bytes: int
    high_at: int
    factors_at: int
    min_factors_at: int
    scales_at: int
    offsets_at: int
    first_level: float | None = None
    is_e2m1: bool = False
    words: tuple[int, int, int, int] = (0, 0, 0, 0)


def why_not_levels(parts: tuple[PackedWeights, ...]) -> str | None:
    """Returns why no program supports the 4-bit codes of these parts; None if one does, or they have none."""
    for form in (part.format for part in parts):
        levels = form.levels or (0.0,)
        is_known = _is_linear(levels) or levels == MXFP4.levels
        if not is_known and any(level not in range(-128, 128) for level in levels):
            return f"{form.name}: levels that are no bytes"
    return None


def row_format(packed: PackedWeights) -> RowFormat:
    """Returns the format of the rows of ``packed``, for which `why_not_levels` returns None."""
    form = packed.format
    plain = RowFormat(
        form.codes.name,
        form.scales.name,
        form.offsets.name,
        form.group or _WHOLE_ROW,
        form.n_groups(packed.n_in),
        form.shared_rows,
        packed.n_in,
        form.row_bytes(packed.n_in),
        *section_starts(packed),
    )
    if form.levels is None:
        return plain
    if _is_linear(form.levels):
        return plain._replace(first_level=form.levels[0])
    if form.levels == MXFP4.levels:
        return plain._replace(is_e2m1=True)
    words = struct.unpack("<4i", struct.pack("<16b", *map(int, form.levels)))
    return plain._replace(words=words)


def _is_linear(levels: tuple[float, ...]) -> bool:
    return all(level == levels[0] + index for index, level in enumerate(levels))


@triton.jit
def _halves(each: tl.tensor, n_bits: tl.constexpr) -> tl.tensor:
    """Splits (rows, n) into (rows, 2 n): the low ``n_bits`` of each number, then its other bits."""
    return tl.reshape(tl.join(each & ((1 << n_bits) - 1), each >> n_bits), (each.shape[0], 2 * each.shape[1]))


@triton.jit
def _fields(
    at: tl.tensor,
    row_exists: tl.tensor,
    start: tl.tensor,
    form: tl.constexpr,
    n_bits: tl.constexpr,
    depth: tl.constexpr,
) -> tl.tensor:
    """Returns fields ``start`` to ``start + depth`` of ``n_bits`` each, lowest bits first: (rows, depth) uint8."""
    n_fields: tl.constexpr = 8 // n_bits
    byte = start // n_fields + tl.arange(0, depth // n_fields)
    exists = row_exists[:, None] & (byte < (form.n_in + n_fields - 1) // n_fields)[None, :]
    packed = tl.load(at[:, None] + byte[None, :], mask=exists, other=0, eviction_policy="evict_first")
    if n_bits <= 4:
        packed = _halves(packed, 4)
    if n_bits <= 2:
        packed = _halves(packed, 2)
    if n_bits <= 1:
        packed = _halves(packed, 1)
    return packed


@triton.jit
def _values(
    at: tl.tensor,
    row_exists: tl.tensor,
    start: tl.tensor,
    form: tl.constexpr,
    depth: tl.constexpr,
) -> tl.tensor:
    """Returns the values of the codes before scaling, (rows, depth) float32."""
    if form.codes == "FP8":
        code = _fields(at, row_exists, start, form, 8, depth)
        if target_info.cuda_capability_geq(8, 9):
            value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            # Shifts exponent and fraction to their places in a float32; 2^120 corrects the difference in exponent bias.
            code = code.to(tl.int32)
            value = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * 2.0**120
            value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    elif form.codes == "INT8":
        value = _fields(at, row_exists, start, form, 8, depth).to(tl.int8).to(tl.float32)
    elif form.codes == "LEVELS4":
        code = _fields(at, row_exists, start, form, 4, depth)
        if form.first_level is not None:
            value = code.to(tl.float32) + form.first_level
        else:
            code = code.to(tl.int32)
            if form.is_e2m1:  # as for FP8; the difference in exponent bias is 126
                value = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 2.0**126
            else:
                low = tl.where((code & 4) == 0, form.words[0], form.words[1])
                high = tl.where((code & 4) == 0, form.words[2], form.words[3])
                word = tl.where((code & 8) == 0, low, high)
                value = (word >> ((code & 3) * 8)).to(tl.int8).to(tl.float32)
    elif form.codes == "UINT5":
        high = _fields(at + form.high_at, row_exists, start, form, 1, depth)
        value = (_fields(at, row_exists, start, form, 4, depth) | (high << 4)).to(tl.float32)
    else:
        high = _fields(at + form.high_at, row_exists, start, form, 2, depth)
        value = (_fields(at, row_exists, start, form, 4, depth) | (high << 4)).to(tl.float32) - 32.0
    return value


@triton.jit
def _plain(
    at: tl.tensor, row_exists: tl.tensor, start: tl.tensor, form: tl.constexpr, dtype: tl.constexpr, depth: tl.constexpr
) -> tl.tensor:
    """Returns weights that are stored as floats, (rows, depth) float32."""
    step = start + tl.arange(0, depth)
    exists = row_exists[:, None] & (step < form.n_in)[None, :]
    at = at.to(tl.pointer_type(dtype), bitcast=True)
    return tl.load(at[:, None] + step[None, :], mask=exists, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _numbers(
    row_at: tl.tensor,
    section: tl.constexpr,
    index: tl.tensor,
    exists: tl.tensor,
    dtype: tl.constexpr,
    form: tl.constexpr,
) -> tl.tensor:
    """Returns numbers ``index`` (n,) of a section of the rows that begin at ``row_at`` (rows,): (rows, n) float32."""
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    at = row_at[:, None] + section
    if section % size == 0 and form.row_bytes % size == 0:
        at = at.to(tl.pointer_type(dtype), bitcast=True)
        numbers = tl.load(at + index[None, :], mask=exists, other=0.0)
    else:  # not aligned: a GPU loads a number only from a multiple of its size, so it is read byte by byte
        word: tl.constexpr = tl.uint16 if size == 2 else tl.uint32
        bits = tl.zeros(exists.shape, word)
        for i in tl.static_range(size):
            bits |= tl.load(at + (index * size + i)[None, :], mask=exists, other=0).to(word) << (8 * i)
        numbers = bits.to(dtype, bitcast=True)
    return numbers.to(tl.float32)


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
    """Returns the scales of ``n`` groups from weight ``start`` on, and the offsets to subtract: (rows, n) float32."""
    group = start // form.group + tl.arange(0, n)
    exists = row_exists[:, None] & (group < form.n_groups)[None, :]
    offset = 0.0
    if form.offsets != "NONE":
        offset = _numbers(at, form.offsets_at, group, exists, tl.uint8, form)
    if form.shared_rows > 1:
        places = shared + (row // form.shared_rows)[:, None] * form.n_groups + group[None, :]
        scale = tl.load(places, mask=exists, other=0.0)
    elif form.scales == "F32":
        scale = _numbers(at, form.scales_at, group, exists, tl.float32, form)
    elif form.scales == "F16":
        scale = _numbers(at, form.scales_at, group, exists, tl.float16, form)
    elif form.scales == "BF16":
        scale = _numbers(at, form.scales_at, group, exists, tl.bfloat16, form)
    elif form.scales == "E8M0":
        exponent = tl.load(at[:, None] + form.scales_at + group[None, :], mask=exists, other=0).to(tl.int32)
        bits = tl.where(exponent == 0, 0x00400000, exponent << 23)  # 0 is 2^-127, half the smallest normal number
        scale = tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        super_group = group * form.group // _SUPER_GROUP
        scale = _numbers(at, form.scales_at, group, exists, tl.int8, form)
        scale *= _numbers(at, form.factors_at, super_group, exists, tl.float16, form)
        if form.offsets != "NONE":
            offset *= _numbers(at, form.min_factors_at, super_group, exists, tl.float16, form)
    return scale, offset


@triton.jit
def _spread(each: tl.tensor, depth: tl.constexpr) -> tl.tensor:
    """Expands (rows, n) to (rows, depth), repeating each number depth / n times."""
    n_rows: tl.constexpr = each.shape[0]
    n: tl.constexpr = each.shape[1]
    return tl.reshape(tl.broadcast_to(each[:, :, None], (n_rows, n, depth // n)), (n_rows, depth))


@triton.jit
def unpacked(
    data: tl.tensor,
    shared: tl.tensor,
    row: tl.tensor,
    row_exists: tl.tensor,
    start: tl.tensor,
    form: tl.constexpr,
    depth: tl.constexpr,
) -> tl.tensor:
    """Returns weights ``start`` to ``start + depth`` of rows of one expert: (rows, depth) float32, not rounded.

    Weights beyond a row's end are arbitrary but finite if the scales are; rows that do not exist are not read.

    data: packed rows; shared: scales that rows share; row, row_exists: (rows,).
    """
    at = data + row.to(tl.int64) * form.row_bytes
    if form.codes == "BFLOAT16":
        weights = _plain(at, row_exists, start, form, tl.bfloat16, depth)
    elif form.codes == "FLOAT16":
        weights = _plain(at, row_exists, start, form, tl.float16, depth)
    elif form.codes == "FLOAT32":
        weights = _plain(at, row_exists, start, form, tl.float32, depth)
    else:
        n_groups: tl.constexpr = depth // form.group if form.group < depth else 1
        scale, offset = _scales(at, shared, row, row_exists, start, form, n_groups)
        weights = _values(at, row_exists, start, form, depth)
        if form.offsets == "ZERO":
            weights -= _spread(offset, depth)
        weights *= _spread(scale, depth)
        if form.offsets == "MIN":
            # The product is exact (11 bits of the factor, 8 of the scale, 5 of the code), so fusing changes no bit.
            weights -= _spread(offset, depth)
    return weights
