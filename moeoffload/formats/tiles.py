"""Converts packed rows to and from tiles of 16 rows, which a CPU multiplies without unpacking (``cpu/tiles.h``).

A tile has the bytes of its rows in the order in which the kernel reads them. For each block of 32 weights: the scales
of groups that begin there, of all rows (each 256 weights preceded by their factors; each group's scales followed by its
offsets), then high bits, then codes. Codes are in vectors of 64 bytes, four bytes of each row: FP8 codes; or signed
bytes plus 128; or 4-bit codes, those of the next four weights in the upper halves.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from moeoffload import native
from moeoffload.formats.packed_format import Codes, PackedFormat, Scales
from moeoffload.native import Features, native_library

TILE_ROWS: Final = 16
_BLOCK: Final = 32
_SUPER_BLOCK: Final = 256
_WHOLE_ROW_BITS: Final = 40
_COPIED_BYTES: Final = 1 << 18
_HIGH_BITS: Final = {Codes.UINT5: 1, Codes.INT6: 2}


class Part(ctypes.Structure):
    """A section of neighbouring rows."""

    _fields_ = (("at", ctypes.c_void_p), ("stride", ctypes.c_int64))


_PARTS: Final = ("codes", "high", "scales", "offsets", "factors", "min_factors")


class Rows(ctypes.Structure):
    """Rows to convert."""

    _fields_ = (
        *((name, Part) for name in _PARTS),
        *((name, ctypes.c_int64) for name in ("n_in", "code_bits", "high_bits", "scale_bytes", "is_fp8", "group_bits")),
    )


class Read(ctypes.Structure):
    """``size`` bytes to read from a file."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("file", "offset", "size", "to"))


class Copy(ctypes.Structure):
    """``n`` pieces of ``size`` bytes to copy."""

    _fields_ = (("start", Part), *((name, ctypes.c_int64) for name in ("to", "to_stride", "size", "n")))


class Matrix(ctypes.Structure):
    """A matrix to read."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("reads", "steps", "copies", "rows")),
        *((name, ctypes.c_int64) for name in ("n_reads", "n_steps", "n_copies", "n_data")),
        *((name, ctypes.c_int64) for name in ("start", "n_rows", "row_bytes")),
    )


def can_tile(form: PackedFormat, n_out: int, n_in: int) -> bool:
    """Whether matrices (n_out, n_in) of a format can be converted to tiles."""
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


def _power_up(number: int) -> int:
    """Returns the smallest power of 2 that is at least ``number``; numbers below 1 are returned as they are."""
    return 1 << (number - 1).bit_length() if number > 0 else number


@functools.cache
def integer_levels(levels: tuple[float, ...] | None) -> tuple[tuple[int, ...], int, float] | None:
    """Returns levels as unsigned bytes, the byte of the value 0 (0 or a power of 2), and the value of a step; None if
    the levels are not multiples of 1 or 0.5 in that range."""
    if levels is None:
        return None
    for step in (1.0, 0.5):
        if all((level / step).is_integer() for level in levels):
            zero = _power_up(-int(min(levels) / step))
            numbers = tuple(int(level / step) + zero for level in levels)
            return (numbers, zero, step) if 0 <= zero <= 128 and max(numbers) < 256 else None
    return None


def multiplies_tiles(parts: Iterable[tuple[PackedFormat, int, int]], dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies a matrix of ``parts``, (format, n_out, n_in), in tiles for compute dtype ``dtype``.
    Without a matrix unit that is faster than unpacking."""
    parts, features = tuple(parts), native.cpu_features()
    are_fp8 = [form.codes is Codes.FP8 for form, _, _ in parts]
    if Features.MATRIX_UNIT in features or dtype is torch.float32 or any(are_fp8) != all(are_fp8):
        return False
    return Features.AVX2 in features and all(can_tile(*part) for part in parts)


def write_tiles(form: PackedFormat, n_in: int, parts: Mapping[str, torch.Tensor], tiles: torch.Tensor) -> None:
    """Converts rows to tiles; `can_tile` must allow it.

    Args:
        parts: (n, bytes) uint8 for each of `PackedFormat.sections`; n is a multiple of TILE_ROWS.
        tiles: (n, row_bytes) contiguous, written; must not overlap ``parts``.
    """
    kept = {name: part if part.stride(1) == 1 else part.contiguous() for name, part in parts.items()}
    rows = rows_of(form, n_in, kept, len(tiles))
    _library().moe_make_tiles(ctypes.byref(rows), tiles.data_ptr(), TILE_ROWS * tiles.shape[1], len(tiles) // TILE_ROWS)


def make_tiles(form: PackedFormat, n_in: int, data: torch.Tensor) -> None:
    """Converts packed rows (n_experts, n_out, row_bytes) to tiles in place; `can_tile` must allow it."""
    places = form.sections(n_in)
    step = max(1, _COPIED_BYTES // (TILE_ROWS * data.shape[2])) * TILE_ROWS

    def run(rows: torch.Tensor) -> None:
        copy = rows.clone()
        write_tiles(form, n_in, {name: copy[:, place] for name, place in places.items()}, rows)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(run, data.flatten(0, 1).split(step)):
            pass


def read_tiles(form: PackedFormat, n_in: int, tiles: torch.Tensor) -> torch.Tensor:
    """Converts tiles (n, row_bytes), contiguous, back to packed rows (n, row_bytes); n is a multiple of TILE_ROWS."""
    out = torch.zeros_like(tiles)
    rows = rows_of(form, n_in, {name: out[:, place] for name, place in form.sections(n_in).items()}, len(out))
    _library().moe_read_tiles(ctypes.byref(rows), tiles.data_ptr(), TILE_ROWS * tiles.shape[1], len(out) // TILE_ROWS)
    return out


def rows_of(form: PackedFormat, n_in: int, parts: Mapping[str, torch.Tensor], n_rows: int) -> Rows:
    """Returns the places of rows that are in ``parts``. Raises ValueError: their shapes are wrong."""
    sizes = {name: place.stop - place.start for name, place in form.sections(n_in).items()}
    if {name: tuple(part.shape) for name, part in parts.items()} != {name: (n_rows, sizes[name]) for name in sizes}:
        raise ValueError(f"{form.name}: parts {[tuple(each.shape) for each in parts.values()]} for rows of {sizes}")
    places = {name: Part(part.data_ptr(), part.stride(0)) for name, part in parts.items()}
    return Rows(
        *(places.get(name, Part()) for name in _PARTS),
        *(n_in, 8 if form.codes in (Codes.INT8, Codes.FP8) else 4, _HIGH_BITS.get(form.codes, 0)),
        *(sizes.get("scales", 0) // form.n_groups(n_in), form.codes is Codes.FP8),
        form.group.bit_length() - 1 if form.group else _WHOLE_ROW_BITS,
    )


def matrix_reader() -> Any:
    """Returns the function that reads a matrix, or None without the library."""
    library = _library()
    return None if library is None else library.moe_read_matrix


@functools.cache
def _library() -> Any:
    library = native_library()
    if library is None:
        return None
    pointer, word = ctypes.c_void_p, ctypes.c_int64
    for function in (library.moe_make_tiles, library.moe_read_tiles):
        function.argtypes, function.restype = [pointer, pointer, word, word], None
    library.moe_read_matrix.argtypes = [pointer, pointer, pointer]
    return library
