"""Packed rows as tiles of 16 rows, as a CPU multiplies them without unpacking (``kernels/cpu/tiles.h``), and back.

A tile has the bytes of its rows in the order of reading. For each block of 32 weights: the scales of groups that begin
there, of all rows (before them, each 256 weights, their factors; behind each, offsets), high bits, codes. Codes are in
vectors of 64 bytes, four of each row: FP8; or signed bytes plus 128; or 4 bits, the next four weights' in the upper
halves.
"""

from __future__ import annotations

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from moeoffload.formats.packed_format import Codes, Offsets, PackedFormat, Scales
from moeoffload.native import native_library

TILE_ROWS: Final = 16
_BLOCK: Final = 32
_SUPER_BLOCK: Final = 256
_WHOLE_ROW: Final = 1 << 40
_HIGH_BITS: Final = {Codes.UINT5: 1, Codes.INT6: 2}


class _Rows(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("n_in", "row_bytes", "code_bits", "high_bits", "high", "scales", "scale_bytes", "offsets", "factors"),
            *("min_factors", "group", "is_fp8"),
        )
    )


def can_tile(form: PackedFormat, n_out: int, n_in: int) -> bool:
    """Whether rows of the format become tiles."""
    least = 16 if form.codes is Codes.INT6 else _BLOCK
    return (
        form.codes in (Codes.INT8, Codes.LEVELS4, Codes.UINT5, Codes.INT6, Codes.FP8)
        and (integer_levels(form.levels) is not None or form.codes is not Codes.LEVELS4)
        and (form.shared_rows == 1 or (form.codes is Codes.FP8 and form.shared_rows % TILE_ROWS == 0))
        and n_out % TILE_ROWS == 0
        and n_in % (_SUPER_BLOCK if form.scales is Scales.SUPER else _BLOCK) == 0
        and (form.group == 0 or (form.group >= least and form.group & (form.group - 1) == 0))
        and _library() is not None
    )


@functools.cache
def integer_levels(levels: tuple[float, ...] | None) -> tuple[tuple[int, ...], int, float] | None:
    """Levels as bytes from 0 upwards, the byte of the value 0, and the value of a step; None if there is none."""
    if levels is None:
        return None
    for step in (1.0, 0.5):
        if all((level / step).is_integer() for level in levels):
            zero = -int(min(levels) / step)
            numbers = tuple(int(level / step) + zero for level in levels)
            return (numbers, zero, step) if 0 <= zero <= 128 and max(numbers) < 256 else None
    return None


def make_tiles(form: PackedFormat, n_in: int, data: torch.Tensor) -> None:
    """Turns packed rows (n_experts, n_out, row_bytes), as `can_tile` allows, into tiles in their own memory."""
    n_tiles, n_threads = data.shape[0] * data.shape[1] // TILE_ROWS, torch.get_num_threads()
    rows, tile_bytes = _rows(form, n_in), TILE_ROWS * form.row_bytes(n_in)

    def run(part: int) -> int:
        first, last = (n_tiles * each // n_threads for each in (part, part + 1))
        made: int = _library().moe_make_tiles(ctypes.byref(rows), data.data_ptr() + first * tile_bytes, last - first)
        return made

    with ThreadPoolExecutor(n_threads) as pool:
        if not all(pool.map(run, range(n_threads))):
            raise MemoryError("no memory to lay out packed weights")


def read_tiles(form: PackedFormat, n_in: int, tiles: torch.Tensor) -> torch.Tensor:
    """The packed rows of tiles, (n, row_bytes) contiguous -> (n, row_bytes); n is a multiple of TILE_ROWS."""
    rows = torch.empty_like(tiles)
    of = _rows(form, n_in)
    _library().moe_read_tiles(ctypes.byref(of), tiles.data_ptr(), rows.data_ptr(), tiles.shape[0] // TILE_ROWS)
    return rows


def _rows(form: PackedFormat, n_in: int) -> _Rows:
    places = {name: place.start for name, place in form.sections(n_in).items()}
    n_groups = form.n_groups(n_in)
    scales = form.sections(n_in).get("scales", slice(0, 0))
    code_bits = 8 if form.codes in (Codes.INT8, Codes.FP8) else 4
    return _Rows(
        *(n_in, form.row_bytes(n_in), code_bits, _HIGH_BITS.get(form.codes, 0)),
        *(places.get("high", -1), scales.start, (scales.stop - scales.start) // n_groups),
        places["offsets"] if form.offsets is not Offsets.NONE else -1,
        *(places.get(name, -1) for name in ("factors", "min_factors")),
        form.group or _WHOLE_ROW,
        form.codes is Codes.FP8,
    )


@functools.cache
def _library() -> Any:
    library = native_library()
    if library is None:
        return None
    pointer, word = ctypes.c_void_p, ctypes.c_int64
    library.moe_make_tiles.argtypes, library.moe_make_tiles.restype = [pointer, pointer, word], ctypes.c_int
    library.moe_read_tiles.argtypes, library.moe_read_tiles.restype = [pointer, pointer, pointer, word], None
    return library
