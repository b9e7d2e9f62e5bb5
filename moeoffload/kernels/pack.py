"""Rows of a call written into a frame, sums written into a reply: one call of C code each.

What takes a dozen torch calls otherwise: which rows have an expert on this server, their values in the payload dtype
and whether all of them are finite there, their weights, and the slots of their experts. Where the C library was not
built `RowPacker.takes` says no, and the others are torch's.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from moeoffload import native
from moeoffload.kernels import calls
from moeoffload.kernels.calls import DTYPE_CODES, PackCall
from moeoffload.payload import store_rows

MAX_ROWS: Final = 16
"""Calls of more rows are left to torch, which shares them out among threads."""


def encode_sums(sums: torch.Tensor, out: torch.Tensor) -> int | None:
    """Writes ``sums`` (n, hidden) float32 into ``out`` (n, hidden) of a dtype in DTYPE_CODES, contiguous on the CPU.
    Returns the first row that is not finite there, or None."""
    library = calls.library()
    if library is None:
        return store_rows(sums, out)
    where = sums.data_ptr(), out.data_ptr(), *sums.shape
    row = library.moe_encode_sums(DTYPE_CODES[out.dtype], native.cpu_features(), *where)
    return row if row >= 0 else None


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
        self._index = torch.empty(MAX_ROWS, dtype=torch.int64)
        self._library = calls.library()
        self._call = PackCall(native.cpu_features(), DTYPE_CODES[source], DTYPE_CODES[payload], hidden, top_k)
        self._call.body, self._call.index = body, self._index.data_ptr()
        self._address = ctypes.addressof(self._call)

    def takes(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> bool:
        """Whether `pack` is made for this call."""
        return (
            self._library is not None
            and ids.shape[0] <= MAX_ROWS
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

        Raises IndexError: an id is no expert's.
        """
        call = self._call
        n_rows = ids.shape[0]
        call.rows, call.ids = hidden.data_ptr(), ids.data_ptr()
        call.weights, call.table = weights.data_ptr(), table.data_ptr()
        call.n_rows, call.n_experts = n_rows, table.shape[0]
        call.holds_all, call.weights_are_f32 = holds_all, weights.dtype == torch.float32
        n_hit = self._library.moe_pack_rows(self._address)
        if n_hit < 0:
            raise IndexError(f"expert ids from {int(ids.min())} to {int(ids.max())}: there are {table.shape[0]}")
        bad = call.bad_row
        self.n_rows, self.bad_row = n_hit, bad if bad >= 0 else None
        return None if n_hit == n_rows else self._index[:n_hit]
