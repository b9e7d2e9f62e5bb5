"""Reads a matrix like one that was read before: one call of C reads its parts and writes its rows.

The interpreter lock is free meanwhile. With several calls for each part, loading threads wait for it most of the time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from moeoffload.checkpoint.tensors import TensorReader
from moeoffload.checkpoint.weights import StoredWeight
from moeoffload.formats import PackedWeights
from moeoffload.formats.conversion import Conversion, Step
from moeoffload.formats.file_format import Packing
from moeoffload.formats.tiles import Copy, Matrix, Part, Read, matrix_reader, rows_of


class RepeatedRead:
    """What reading one matrix has shown: where its sections are in the buffers into which this thread reads parts."""

    def __init__(
        self,
        packing: Packing,
        parts: Mapping[str, torch.Tensor],
        conversions: Sequence[Conversion],
        sections: Mapping[str, torch.Tensor],
        shared: Sequence[tuple[torch.Tensor, torch.Tensor]],
        room: PackedWeights,
        slot: int,
        rows: slice | torch.Tensor,
    ) -> None:
        """Learns from the matrix that was just read; later ones are packed alike, and go to rooms like ``room``.

        Args:
            packing: how it is packed.
            parts: its stored parts by role, of one matrix, in this thread's buffers.
            conversions: what was done with the parts.
            sections: (n, bytes) uint8, written to ``rows`` of ``room[slot]``.
            shared: scales that rows share, (blocks of rows, groups), and the place to which they were copied; or none.
            room: where it was written; ``room.data`` is (slots, out, row bytes) uint8.
            slot: its place there.
            rows: its rows there.
        """
        self.packing = packing
        self._function = None
        used = [*sections.values(), *(scales for scales, _ in shared), *(each.source for each in conversions)]
        owners = {_storage(each) for each in (*parts.values(), *(each.to for each in conversions))}
        if not isinstance(rows, slice) or any(_storage(view) not in owners or view.stride(1) != 1 for view in used):
            return  # the sections of another matrix are not only other bytes in the same places
        self._function = matrix_reader()
        stored = {_storage(view) for view in used}
        # The other parts determine what the sections are and whether they are valid: they must have the same values.
        others = [part.flatten().view(torch.uint8).numpy() for part in parts.values() if _storage(part) not in stored]
        self._others = [(other, other.tobytes()) for other in others]
        to = room.data[slot, rows]
        of_data, of_scales = _address(room.data, slot), _address(room.scales, slot)
        tiles = rows_of(room.format, room.n_in, sections, len(to)) if room.in_tiles else None
        pairs = [] if tiles else [(part, room.section(name)[slot, rows]) for name, part in sections.items()]
        reads = [Read(0, 0, part.nbytes, part.data_ptr()) for part in parts.values()]
        copies = [*(_copy(*pair, of_data) for pair in pairs), *(_copy(*pair, of_scales) for pair in shared)]
        steps = [each.step for each in conversions]
        arrays = (Read * len(reads))(*reads), (Step * len(steps))(*steps), (Copy * len(copies))(*copies)
        self._reads = arrays[0]
        self._matrix = Matrix(
            *(ctypes.addressof(each) for each in arrays),
            ctypes.addressof(tiles) if tiles else None,
            *(len(each) for each in arrays),
            *(len(pairs), to.data_ptr() - of_data, len(to), to.shape[1]),
        )
        self._kept = parts, conversions, tiles, arrays  # whose addresses are in the matrix

    def read(self, reader: TensorReader, weight: StoredWeight, expert: int, room: PackedWeights, slot: int) -> bool:
        """Reads another matrix to ``room[slot]``; False: it must be read in another way, which also tells errors."""
        if self._function is None:
            return False
        for read, tensor in zip(self._reads, weight.parts.values(), strict=True):
            read.file = reader.descriptor(tensor.file)
            read.offset = tensor.offset + (0 if len(weight.shape) == 2 else expert * read.size)
        done = self._function(ctypes.byref(self._matrix), _address(room.data, slot), _address(room.scales, slot))
        return done and all(other.tobytes() == expected for other, expected in self._others)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copy(part: torch.Tensor, to: torch.Tensor, start: int) -> Copy:
    """Returns the copy of rows to a place that is found from the address ``start`` of its slot."""
    size, strides = part.shape[1] * part.itemsize, (part.stride(0) * part.itemsize, to.stride(0) * to.itemsize)
    return Copy(Part(part.data_ptr(), strides[0]), to.data_ptr() - start, strides[1], size, len(part))


def _address(tensor: torch.Tensor | None, slot: int) -> int:
    return 0 if tensor is None else tensor.data_ptr() + slot * tensor.stride(0) * tensor.itemsize
