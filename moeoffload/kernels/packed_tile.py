"""The packed-operand tile: rows of bfloat16 times a packed matrix, as a numba intrinsic in LLVM vector code.

The instruction multiplies pairs of neighbours in the inner dimension. A row has them side by side; the other operand is
packed so that one vector has the pairs of 16 columns. An output is one lane of one accumulator that runs over the inner
dimension in order, so its bits do not depend on which rows or columns are computed together.
"""

from __future__ import annotations

from itertools import product
from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from moeoffload.kernels.vector_ir import F32, I32, I64, BFloat, call_llvm, vector

PACKED_ROWS: Final = 6
"""Most rows of a tile."""
PACKED_VECTORS: Final = 4
"""Most vectors of columns of a tile: their accumulators, the packed operand's vectors and a row's stay in registers."""
PACKED_LANES: Final = 16
"""Columns of a vector."""
_VECTOR_BYTES: Final = 64
# How a size of tile is numbered.
_STEP: Final = PACKED_ROWS + 1
_SIZES: Final = (PACKED_VECTORS + 1) * _STEP


class _Tile:
    """Writes the code of a tile of ``n_rows`` rows and ``n_vectors`` vectors of columns."""

    def __init__(self, builder: ir.IRBuilder, given: list[ir.Value], *, adds: bool) -> None:
        self.builder = builder
        self.rows, self.row_bytes, self.packed, self.n_pairs, self.out, self.out_bytes = given
        self.adds = adds
        self.sums = vector(F32, PACKED_LANES)
        self.pairs = vector(BFloat(), 2 * PACKED_LANES)

    def emit(self, n_rows: int, n_vectors: int) -> None:
        builder = self.builder
        places = [
            [self._pointer(self.out, m, self.out_bytes, n * _VECTOR_BYTES, self.sums) for n in range(n_vectors)]
            for m in range(n_rows)
        ]
        zero = ir.Constant(self.sums, None)
        first = [[self._load(place, 4) if self.adds else zero for place in row] for row in places]
        rows = [self._start(self.rows, m, self.row_bytes) for m in range(n_rows)]

        before, loop, after = builder.block, *map(builder.append_basic_block, ("packed.loop", "packed.after"))
        builder.branch(loop)
        builder.position_at_end(loop)
        pair = builder.phi(I64)
        pair.add_incoming(ir.Constant(I64, 0), before)
        old = [[builder.phi(self.sums) for _ in row] for row in places]
        start = builder.add(self.packed, builder.mul(pair, ir.Constant(I64, n_vectors * _VECTOR_BYTES)))
        columns = [self._load(self._at(start, n * _VECTOR_BYTES, self.pairs), 64) for n in range(n_vectors)]
        new = []
        for row, sums in zip(rows, old, strict=True):
            both = self._both(builder.add(row, builder.mul(pair, ir.Constant(I64, 4))))
            new.append([self._multiply_add(total, column, both) for total, column in zip(sums, columns, strict=True)])
        following = builder.add(pair, ir.Constant(I64, 1))
        pair.add_incoming(following, loop)
        for phis, begins, ends in zip(old, first, new, strict=True):
            for phi, begin, end in zip(phis, begins, ends, strict=True):
                phi.add_incoming(begin, before)
                phi.add_incoming(end, loop)
        builder.cbranch(builder.icmp_signed("<", following, self.n_pairs), loop, after)

        builder.position_at_end(after)
        for row_places, totals in zip(places, new, strict=True):
            for place, total in zip(row_places, totals, strict=True):
                builder.store(total, place).align = 4

    def _both(self, address: ir.Value) -> ir.Value:
        """One pair of a row in all lanes."""
        builder, kind = self.builder, vector(I32, PACKED_LANES)
        value = self._load(builder.inttoptr(address, I32.as_pointer()), 2)
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        lanes = ir.Constant(kind, [0] * PACKED_LANES)
        return builder.bitcast(builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), lanes), self.pairs)

    def _multiply_add(self, total: ir.Value, columns: ir.Value, both: ir.Value) -> ir.Value:
        kinds = [self.sums, self.pairs, self.pairs]
        return call_llvm(self.builder, "llvm.x86.avx512bf16.dpbf16ps.512", self.sums, kinds, [total, columns, both])

    def _load(self, place: ir.Value, align: int) -> ir.Value:
        value = self.builder.load(place)
        value.align = align
        return value

    def _start(self, base: ir.Value, number: int, step: ir.Value) -> ir.Value:
        return self.builder.add(base, self.builder.mul(step, ir.Constant(I64, number)))

    def _at(self, start: ir.Value, n_bytes: int, kind: ir.Type) -> ir.Value:
        return self.builder.inttoptr(self.builder.add(start, ir.Constant(I64, n_bytes)), kind.as_pointer())

    def _pointer(self, base: ir.Value, number: int, step: ir.Value, n_bytes: int, kind: ir.Type) -> ir.Value:
        return self._at(self._start(base, number, step), n_bytes, kind)


@intrinsic
def packed_products(
    typing_context: Any,
    adds: Any,
    n_rows: Any,
    n_vectors: Any,
    rows: Any,
    row_bytes: Any,
    packed: Any,
    n_pairs: Any,
    out: Any,
    out_bytes: Any,
) -> Any:
    """``out[m, c] = sum over k of rows[m, k] * packed[k, c]`` in float32, for m < n_rows and c < 16 * n_vectors.

    Args:
        adds: 1 adds to what ``out`` holds, 0 does not.
        n_rows: 1 to PACKED_ROWS.
        n_vectors: 1 to PACKED_VECTORS.
        rows: address of bfloat16 rows.
        row_bytes: from one of them to the next.
        packed: address, a multiple of 64, of (n_pairs, 16 * n_vectors, 2) bfloat16: pairs of neighbours in k.
        n_pairs: at least 1.
        out: address of float32 rows.
        out_bytes: from one of them to the next.
    """
    del typing_context, adds, n_rows, n_vectors, rows, row_bytes, packed, n_pairs, out, out_bytes

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        adds, rows, vectors, *given = values
        done = builder.append_basic_block("packed.end")
        case = builder.add(builder.mul(adds, ir.Constant(I64, _SIZES)), builder.mul(vectors, ir.Constant(I64, _STEP)))
        choice = builder.switch(builder.add(case, rows), done)
        for kind, n_vectors, n_rows in product(range(2), range(1, PACKED_VECTORS + 1), range(1, PACKED_ROWS + 1)):
            block = builder.append_basic_block(f"packed.{kind}.{n_vectors}.{n_rows}")
            choice.add_case(ir.Constant(I64, kind * _SIZES + n_vectors * _STEP + n_rows), block)
            builder.position_at_end(block)
            _Tile(builder, given, adds=bool(kind)).emit(n_rows, n_vectors)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate
