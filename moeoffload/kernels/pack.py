"""Writes a few rows into a frame in one compiled pass: those of a layer's call on the host, their sums on the server.

What takes a dozen torch calls otherwise: which rows have an expert on this server, their values in the payload dtype
and whether all of them are finite there, their weights, and the slots of their experts.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numba import njit, types

from moeoffload.kernels.phases import convert, view
from moeoffload.kernels.program import WEIGHT_TYPES, compile_entry, source_stamp
from moeoffload.kernels.vector_ir import bits_of, narrow, widen

MAX_ROWS: Final = 16
"""Calls of more rows are left to torch, which shares them out among threads."""

# Words of a packer's call block.
PACK_HIDDEN: Final = 0
PACK_IDS: Final = 1
PACK_WEIGHTS: Final = 2
PACK_TABLE: Final = 3
PACK_BODY: Final = 4
PACK_INDEX: Final = 5
PACK_N_ROWS: Final = 6
PACK_TOP_K: Final = 7
PACK_WIDTH: Final = 8
PACK_N_EXPERTS: Final = 9
PACK_HOLDS_ALL: Final = 10
PACK_WEIGHTS_ARE_F32: Final = 11
PACK_N_HIT: Final = 12
PACK_BAD_ROW: Final = 13
PACK_WORDS: Final = 14

_BAD_ID: Final = -2

# Of each payload type: bits without the sign, and the first value of them that is not finite.
_MAGNITUDE: Final = {np.uint16: (0x7FFF, 0x7F80), np.int16: (0x7FFF, 0x7C00), np.float32: (0x7FFFFFFF, 0x7F800000)}


@njit(nogil=True)
def _raw(value: Any) -> Any:
    """The bits of an element of any of the three types."""
    if isinstance(value, np.float32):
        return bits_of(value)
    return np.int32(value)


@njit(nogil=True)
def _find_rows(ids: Any, top_k: int, table: Any, n_rows: int, holds_all: int, index: Any) -> int:
    """Writes the rows with an expert in ``table`` to ``index``; returns how many, or _BAD_ID."""
    n_hit = 0
    for row in range(n_rows):
        hit = holds_all
        for k in range(top_k):
            expert = ids[row * top_k + k]
            if expert < 0 or expert >= table.size:
                return _BAD_ID
            if table[expert] >= 0:
                hit = 1
        if hit:
            index[n_hit] = row
            n_hit += 1
    return n_hit


def _make_pack(source: Any, payload: Any, stamp: int) -> Callable[[int], None]:
    magnitude, infinite = _MAGNITUDE[payload]
    item_bytes = np.dtype(payload).itemsize

    def pack(address: int) -> None:
        _ = stamp
        call = view(address, np.int64, PACK_WORDS)
        n_rows, top_k, width = call[PACK_N_ROWS], call[PACK_TOP_K], call[PACK_WIDTH]
        hidden = view(call[PACK_HIDDEN], source, n_rows * width)
        ids = view(call[PACK_IDS], np.int64, n_rows * top_k)
        table = view(call[PACK_TABLE], np.int16, call[PACK_N_EXPERTS])
        index = view(call[PACK_INDEX], np.int64, n_rows)
        n_hit = _find_rows(ids, top_k, table, n_rows, call[PACK_HOLDS_ALL], index)
        call[PACK_N_HIT] = n_hit
        call[PACK_BAD_ROW] = -1
        if n_hit <= 0:
            return
        rows = view(call[PACK_BODY], payload, n_hit * width)
        weights = view(call[PACK_BODY] + n_hit * width * item_bytes, np.float32, n_hit * top_k)
        slots = view(call[PACK_BODY] + n_hit * (width * item_bytes + top_k * 4), np.int16, n_hit * top_k)
        exact = view(call[PACK_WEIGHTS], np.float32, n_rows * top_k)
        rounded = view(call[PACK_WEIGHTS], source, n_rows * top_k)
        for i in range(n_hit):
            row = index[i]
            largest = np.int32(0)
            for j in range(width):
                value = narrow(widen(hidden[row * width + j]), rows[0])
                rows[i * width + j] = value
                largest = max(largest, _raw(value) & np.int32(magnitude))
            if largest >= infinite:
                call[PACK_BAD_ROW] = i
                return
            for k in range(top_k):
                at = row * top_k + k
                weights[i * top_k + k] = exact[at] if call[PACK_WEIGHTS_ARE_F32] else widen(rounded[at])
                slots[i * top_k + k] = table[ids[at]]

    return pack


def _make_encode(payload: Any, stamp: int) -> Callable[[int, int, int, int], int]:
    magnitude, infinite = _MAGNITUDE[payload]

    def encode(sums_address: int, out_address: int, n_rows: int, width: int) -> int:
        _ = stamp
        sums = view(sums_address, np.float32, n_rows * width)
        out = view(out_address, payload, n_rows * width)
        bad = -1
        for row in range(n_rows):
            largest = np.int32(0)
            for at in range(row * width, (row + 1) * width):
                value = narrow(sums[at], out[0])
                out[at] = value
                largest = max(largest, _raw(value) & np.int32(magnitude))
            if largest >= infinite and bad < 0:
                bad = row
        return bad

    return encode


def _make_unpack(target: Any, stamp: int) -> Callable[[int, int, int, int, int], None]:
    def unpack(slots_address: int, slots_out: int, weights_address: int, weights_out: int, n: int) -> None:
        _ = stamp
        slots, wide = view(slots_address, np.int16, n), view(slots_out, np.int64, n)
        weights, rounded = view(weights_address, np.float32, n), view(weights_out, target, n)
        for at in range(n):
            wide[at] = slots[at]
            rounded[at] = narrow(weights[at], rounded[0])

    return unpack


@functools.cache
def unpack_program(target: torch.dtype) -> Any:
    """Compiled: n routes out of a frame. ``(slots, to, weights, to, n)``: int16 to int64, float32 to a dtype."""
    return compile_entry(_make_unpack(WEIGHT_TYPES[target], source_stamp()), types.void, 5)


def _make_convert(source: Any, target: Any, stamp: int) -> Callable[[int, int, int], None]:
    def convert_rows(values_address: int, out_address: int, count: int) -> None:
        _ = stamp
        convert(view(values_address, source, count), view(out_address, target, count))

    return convert_rows


@functools.cache
def convert_program(source: torch.dtype, target: torch.dtype) -> Any:
    """Compiled: from an address to an address, so many elements of a dtype to another one."""
    return compile_entry(_make_convert(WEIGHT_TYPES[source], WEIGHT_TYPES[target], source_stamp()), types.void, 3)


@functools.cache
def encode_program(payload: torch.dtype) -> tuple[Any, Callable[[int, int, int, int], int]]:
    """The program of `SumEncoder` for a payload dtype."""
    compiled = compile_entry(_make_encode(WEIGHT_TYPES[payload], source_stamp()), types.int64, 4)
    return compiled, ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(compiled.address)


class SumEncoder:
    """Writes float32 sums into a reply of the payload dtype. Thread-safe."""

    def __init__(self, payload: torch.dtype) -> None:
        self._kept, self._run = encode_program(payload)

    def encode(self, sums: torch.Tensor, out: torch.Tensor) -> int | None:
        """Writes ``sums`` (n, hidden) float32 into ``out`` (n, hidden) of the payload dtype, contiguous on the CPU.

        Returns:
            the first row that is not finite in the payload dtype, or None.
        """
        bad = self._run(sums.data_ptr(), out.data_ptr(), sums.shape[0], sums.shape[1])
        return bad if bad >= 0 else None


@functools.cache
def pack_program(source: torch.dtype, payload: torch.dtype) -> tuple[Any, Callable[[int], None]]:
    """The program of `RowPacker` for rows of a dtype that travel as another one."""
    compiled = compile_entry(_make_pack(WEIGHT_TYPES[source], WEIGHT_TYPES[payload], source_stamp()))
    return compiled, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)


class RowPacker:
    """Packs into one buffer, which must outlive it. Not thread-safe: every slot of a channel has its own.

    Attributes:
        n_rows: rows that the last call wrote.
        bad_row: the first of them that is not finite in the payload dtype, or None; then the frame is not complete.
    """

    def __init__(self, body: int, source: torch.dtype, payload: torch.dtype, *, hidden: int, top_k: int) -> None:
        """For rows of ``source`` that travel as ``payload``; ``body`` is the address where a dispatch body begins."""
        self.n_rows = 0
        self.bad_row: int | None = None
        self._source = source
        self._kept, self._run = pack_program(source, payload)
        self._index = torch.empty(MAX_ROWS, dtype=torch.int64)
        self._call = (ctypes.c_int64 * PACK_WORDS)()
        self._address = ctypes.addressof(self._call)
        self._call[PACK_BODY] = body
        self._call[PACK_INDEX] = self._index.data_ptr()
        self._call[PACK_TOP_K], self._call[PACK_WIDTH] = top_k, hidden

    @property
    def compiled(self) -> tuple[int, int]:
        """Addresses of the program and of its call block, in which body, index, top_k and width are filled in."""
        return self._kept.address, self._address

    def look(self) -> torch.Tensor | None:
        """What `pack` returns, after compiled code has run the program; sets ``n_rows``."""
        self.n_rows = n_hit = self._call[PACK_N_HIT]
        return None if n_hit == self._call[PACK_N_ROWS] else self._index[:n_hit]

    def takes(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> bool:
        """Whether `pack` is made for this call."""
        return (
            ids.shape[0] <= MAX_ROWS
            and hidden.dtype == self._source
            and ids.dtype == torch.int64
            and weights.dtype in (torch.float32, self._source)
            and hidden.device.type == "cpu"
            and hidden.is_contiguous()
            and ids.is_contiguous()
            and weights.is_contiguous()
        )

    def pack(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, table: torch.Tensor, *, holds_all: bool
    ) -> torch.Tensor | None:
        """Writes the rows that have an expert in ``table``, their weights as float32 and their slots as int16.

        Args:
            hidden: (n, hidden) of the source dtype.
            ids: (n, top_k) int64 expert numbers.
            weights: (n, top_k) float32 or of the source dtype.
            table: (n_experts,) int16, the slot of each expert, -1 for those that are elsewhere.
            holds_all: no expert is elsewhere: every row is written.

        Returns:
            (n_rows,) int64, the rows that were written, valid until the next call; None if all were.

        Raises:
            IndexError: an id is no expert's.
        """
        call = self._call
        n_rows = ids.shape[0]
        call[PACK_HIDDEN], call[PACK_IDS] = hidden.data_ptr(), ids.data_ptr()
        call[PACK_WEIGHTS], call[PACK_TABLE] = weights.data_ptr(), table.data_ptr()
        call[PACK_N_ROWS], call[PACK_N_EXPERTS] = n_rows, table.shape[0]
        call[PACK_HOLDS_ALL], call[PACK_WEIGHTS_ARE_F32] = holds_all, weights.dtype == torch.float32
        self._run(self._address)
        n_hit = call[PACK_N_HIT]
        if n_hit < 0:
            raise IndexError(f"expert ids from {int(ids.min())} to {int(ids.max())}: there are {table.shape[0]}")
        bad = call[PACK_BAD_ROW]
        self.n_rows, self.bad_row = n_hit, bad if bad >= 0 else None
        return None if n_hit == n_rows else self._index[:n_hit]
