"""Plans from which stored weight's row each row of an expert's packed matrix comes, and copies the rows.

transformers' conversions (join gate and up, interleave, transpose) are run once on numbers that encode each element's
origin. The resulting moves of whole rows are then applied to packed rows; a conversion that does more is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from moeoffload.checkpoint.repeated_read import RepeatedRead
from moeoffload.checkpoint.tensors import TensorReader
from moeoffload.checkpoint.weights import StoredWeight
from moeoffload.errors import ModelError
from moeoffload.formats import PLAIN, PackedFormat, PackedWeights, Scales
from moeoffload.formats.conversion import recorded
from moeoffload.formats.file_format import SHARED, Packing, Parts, as_bytes
from moeoffload.formats.tiles import TILE_ROWS

_CPU: Final = torch.device("cpu")
Rows = slice | torch.Tensor


@dataclass(frozen=True)
class Move:
    """Rows ``taken`` of the recipe's stored weight ``number`` become ``rows`` of a piece.

    ``is_transposed``: whether the weight is stored (in, out).
    """

    number: int
    is_transposed: bool
    rows: Rows
    taken: Rows


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows of a matrix, (n_out, n_in), packed in one format; the whole matrix unless formats are mixed."""

    form: PackedFormat
    n_out: int
    n_in: int
    moves: tuple[Move, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return self.form.n_bytes(self.n_out, self.n_in)

    def empty(self, n_experts: int, device: torch.device, *, in_tiles: bool = False) -> PackedWeights:
        """Allocates this piece for ``n_experts`` experts, with undefined values."""
        return PackedWeights.empty(self.form, n_experts, self.n_out, self.n_in, device, in_tiles=in_tiles)

    def fill(
        self,
        out: PackedWeights,
        slot: int,
        reader: TensorReader,
        weights: Sequence[StoredWeight],
        expert: int,
    ) -> None:
        """Writes the rows of one expert to ``out[slot]``; ``weights`` are its stored weights in the recipe's order.

        Raises ModelError when bytes are missing or values do not fit.
        """
        is_direct = out.device == _CPU and (not out.in_tiles or all(_whole_tiles(each.rows) for each in self.moves))
        room, at = (out, slot) if is_direct else (self.empty(1, _CPU), 0)
        for move in self.moves:
            weight, packing = as_packed(weights[move.number], move.is_transposed)
            known: RepeatedRead | None = reader.kept.get(id(move))
            is_alike = known is not None and known.packing is packing
            if known is not None and is_alike and known.read(reader, weight, expert, room, at):
                continue
            into = self._place(room, at, move, packing) if packing.is_verbatim else None
            stored = weight.read_parts(reader, expert, into)
            with recorded() as conversions:
                parts = weight.sections(stored)
            shared = parts.pop(SHARED, None)
            scales = []
            if shared is not None and room.scales is not None:
                n_shared = self.form.shared_rows
                place = room.scales[at, _blocks(move.rows, n_shared)]
                scales = [(shared[_blocks(move.taken, n_shared)], place)]
                place.copy_(scales[0][0])
            elif shared is not None:
                n_out = packing.rows_first[0]
                of_rows = shared.repeat_interleave(min(packing.packed.shared_rows, n_out), dim=0)
                parts["scales"] = as_bytes(of_rows)[:n_out]
            if into is not None:
                del parts["codes"]
            if move.taken != slice(0, packing.rows_first[0], 1):
                parts = {name: values[move.taken] for name, values in parts.items()}
            room.write_rows(at, move.rows, parts)
            if into is None and not is_alike:
                known = RepeatedRead(packing, stored, conversions, parts, scales, room, at, move.rows)
                reader.kept[id(move)] = known
        if room is not out:
            out.put(slot, room)

    def _place(self, room: PackedWeights, slot: int, move: Move, packing: Packing) -> torch.Tensor | None:
        """Returns the contiguous place for the codes of a whole stored weight, or None if there is none."""
        if room.in_tiles or not isinstance(move.rows, slice) or move.taken != slice(0, packing.rows_first[0], 1):
            return None
        place = room.section("codes")[slot, move.rows]
        return place if place.is_contiguous() else None


def as_packed(weight: StoredWeight, is_transposed: bool) -> tuple[StoredWeight, Packing]:
    """Returns a weight and its packing; a plain one gets rows of its own dtype. Raises ModelError for other dtypes."""
    if weight.packing is not None:
        return weight, weight.packing
    dtype = weight.plain.torch_dtype
    if dtype not in PLAIN:
        raise ModelError(f"{weight.name}: is stored as {weight.plain.dtype} beside packed weights; not supported")
    sections = _transposed_codes if is_transposed else _codes
    packing = Packing(PLAIN[dtype], weight.shape, sections, is_transposed, is_verbatim=not is_transposed)
    return replace(weight, packing=packing), packing


def trace(weights: Mapping[str, StoredWeight]) -> dict[str, list[torch.Tensor]]:
    """Returns for each pattern an expert's weight whose elements encode their own weight number, row and column."""
    n_rows, n_columns = _bounds(weights.values())
    dtype = torch.int32 if len(weights) * n_rows * n_columns < 1 << 31 else torch.int64
    traced = {}
    for number, (pattern, weight) in enumerate(weights.items()):
        rows, columns = weight.shape[-2:]
        lines = torch.arange(number * n_rows, number * n_rows + rows, dtype=dtype) * n_columns
        codes = lines[:, None] + torch.arange(columns, dtype=dtype)
        traced[pattern] = [codes if len(weight.shape) == 2 else codes[None]]
    return traced


def plan(target: str, traced: torch.Tensor, weights: Sequence[StoredWeight]) -> tuple[Piece, ...]:
    """Returns the pieces of a matrix.

    Args:
        target: name of the parameter, for errors.
        traced: (out, in), the result of its conversion applied to `trace`.
        weights: the stored weights of an expert, in the order in which they were traced.

    Raises ModelError for a conversion that does not move whole rows, and for formats that cannot be mixed.
    """
    n_rows, n_columns = _bounds(weights)
    start = traced[:, 0]
    number, row, column = start // (n_rows * n_columns), start // n_columns % n_rows, start % n_columns
    steps = torch.arange(traced.shape[1], dtype=traced.dtype)
    by_format: dict[PackedFormat, list[Move]] = {}
    for i, weight in enumerate(weights):
        rows = (number == i).nonzero().flatten()
        if not len(rows):
            continue
        step = int(traced[rows[0], -1] - start[rows[0]]) // max(1, traced.shape[1] - 1)
        is_transposed = weight.packing.is_transposed if weight.packing else step == n_columns > 1
        along, across = (column, row) if is_transposed else (row, column)
        expected = start[rows, None] + steps * (n_columns if is_transposed else 1)
        n_in = weight.shape[-2 if is_transposed else -1]
        if across[rows].any() or n_in != traced.shape[1] or not torch.equal(traced[rows], expected):
            raise ModelError(f"{target}: its conversion mixes columns of {weight.name}, which is packed; not supported")
        _, packing = as_packed(weight, is_transposed)
        by_format.setdefault(packing.packed, []).append(Move(i, is_transposed, rows, along[rows]))
    return _pieces(target, by_format, traced.shape[1])


def _pieces(target: str, by_format: Mapping[PackedFormat, list[Move]], n_in: int) -> tuple[Piece, ...]:
    """Returns one piece for all rows if they have one format, else one per format, whose rows must be neighbours."""
    pieces: list[tuple[int, Piece]] = []
    for form, moves in by_format.items():
        rows = torch.cat([torch.as_tensor(move.rows) for move in moves])
        first, n_out = int(rows.min()), len(rows)
        if int(rows.max()) - first + 1 != n_out:
            raise ModelError(f"{target}: rows of different formats ({form.name} and others) alternate; not supported")
        moved = tuple(
            replace(each, rows=_as_slice(torch.as_tensor(each.rows) - first), taken=_as_slice(each.taken))
            for each in moves
        )
        keeps_blocks = all(_keeps_blocks(rows, form.shared_rows) for each in moved for rows in (each.rows, each.taken))
        packed = form if keeps_blocks else replace(form, shared_rows=1, scales=Scales.F32)
        pieces.append((first, Piece(packed, n_out, n_in, moved)))
    return tuple(piece for _, piece in sorted(pieces, key=lambda each: each[0]))


def _keeps_blocks(rows: Rows, n: int) -> bool:
    """Whether the rows can keep the scales that each ``n`` of them share: consecutive, and starting at a block."""
    return n == 1 or (isinstance(rows, slice) and rows.step == 1 and rows.start % n == 0)


def _bounds(weights: Iterable[StoredWeight]) -> tuple[int, int]:
    """Returns the largest number of rows and of columns of any weight."""
    rows, columns = zip(*(weight.shape[-2:] for weight in weights), strict=True)
    return max(rows), max(columns)


def _as_slice(rows: Rows) -> Rows:
    """Returns the rows as a slice if they are evenly spaced, so that they need not be gathered."""
    numbers = torch.as_tensor(rows)
    first = int(numbers[0])
    step = int(numbers[1]) - first if len(numbers) > 1 else 1
    if step > 0 and torch.equal(numbers, torch.arange(first, first + step * len(numbers), step)):
        return slice(first, first + step * (len(numbers) - 1) + 1, step)
    return numbers.long()


def _whole_tiles(rows: Rows) -> bool:
    """Whether the rows are consecutive and make up whole tiles."""
    return isinstance(rows, slice) and rows.step == 1 and not rows.start % TILE_ROWS and not rows.stop % TILE_ROWS


def _blocks(rows: Rows, n: int) -> slice:
    """Returns the blocks of ``n`` rows that consecutive rows touch."""
    assert isinstance(rows, slice)
    return slice(rows.start // n, -(-rows.stop // n))


def _codes(parts: Parts) -> dict[str, torch.Tensor]:
    return {"codes": as_bytes(parts["weight"])}


def _transposed_codes(parts: Parts) -> dict[str, torch.Tensor]:
    return {"codes": as_bytes(parts["weight"].t())}
