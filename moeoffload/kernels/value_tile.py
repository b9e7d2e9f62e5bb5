"""The second product of attention: a few rows of probabilities times values, as a numba intrinsic in LLVM vector code.

An accumulator runs over the keys in order, so an output's bits do not depend on how many rows are computed together.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from moeoffload.kernels.vector_ir import F32, I32, I64, call_llvm, element, has_vector_512, lanes, vector, widened

VALUE_LANES: Final = lanes()
"""Columns of one vector of values."""

VALUE_ROWS: Final = 8 if has_vector_512() else 4
"""Most rows of a tile, so that the accumulators of two vectors stay in registers."""

_NAMES: Final = ("shares", "share_stride", "values", "value_stride", "n_keys", "sums", "sum_stride")


@intrinsic
def value_tile(
    typing_context: Any,
    n_rows: Any,
    two_vectors: Any,
    shares: Any,
    share_stride: Any,
    values: Any,
    value_stride: Any,
    n_keys: Any,
    sums: Any,
    sum_stride: Any,
) -> Any:
    """``sums[m, c] += shares[m, key] * values[key, c]`` for m < n_rows, key < n_keys and one or two vectors of columns.

    Args:
        n_rows: 1 to VALUE_ROWS.
        two_vectors: columns are 2 * VALUE_LANES, else VALUE_LANES.
        shares: address of float32 rows.
        share_stride: elements from one of them to the next.
        values: array that begins at the first key and column; its element type is that of vector_ir.
        value_stride: elements from one key to the next.
        n_keys: at least 1.
        sums: address of float32 rows.
        sum_stride: elements from one of them to the next.
    """
    del typing_context
    integer = types.int64
    signature = types.void(integer, types.boolean, integer, integer, values, integer, integer, integer, integer)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        n_rows, two_vectors = arguments[:2]
        given = dict(zip(_NAMES, arguments[2:], strict=True))
        array = signature.args[4]
        given["values"] = builder.ptrtoint(context.make_array(array)(context, builder, given["values"]).data, I64)
        tile = _Tile(builder, array.dtype, given)
        done = builder.append_basic_block("values.end")
        blocks = [builder.append_basic_block(f"values.of{count}") for count in (1, 2)]
        builder.cbranch(two_vectors, blocks[1], blocks[0])
        for n_vectors, block in enumerate(blocks, 1):
            builder.position_at_end(block)
            choice = builder.switch(n_rows, done)
            for count in range(1, VALUE_ROWS + 1):
                case = builder.append_basic_block(f"values.{n_vectors}.{count}")
                choice.add_case(ir.Constant(I64, count), case)
                builder.position_at_end(case)
                tile.emit(count, n_vectors)
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return signature, generate


class _Tile:
    """One use of `value_tile`: writes the code for any number of rows and vectors."""

    def __init__(self, builder: ir.IRBuilder, dtype: Any, given: dict[str, ir.Value]) -> None:
        self.builder, self.dtype, self.given = builder, dtype, given
        self.n_bytes = dtype.bitwidth // 8

    def emit(self, n_rows: int, n_vectors: int) -> None:
        """The code for ``n_rows`` rows and ``n_vectors`` vectors of columns."""
        builder, given = self.builder, self.given
        places = [
            [
                self._vector_place(given["sums"], self._times(given["sum_stride"], row), n, 4, F32)
                for n in range(n_vectors)
            ]
            for row in range(n_rows)
        ]
        first = [[self._load(place, 4) for place in row] for row in places]
        shares = [self._offset(given["shares"], self._times(given["share_stride"], row), 4) for row in range(n_rows)]

        before = builder.block
        loop, after = (builder.append_basic_block(name) for name in ("values.loop", "values.after"))
        builder.branch(loop)
        builder.position_at_end(loop)
        key = builder.phi(I64)
        key.add_incoming(ir.Constant(I64, 0), before)
        old = [[builder.phi(value.type) for value in row] for row in first]
        start = builder.mul(key, given["value_stride"])
        values = [self._values(start, n) for n in range(n_vectors)]
        new = [
            [self._multiply_add(self._share(share, key), *pair) for pair in zip(values, totals, strict=True)]
            for share, totals in zip(shares, old, strict=True)
        ]
        following = builder.add(key, ir.Constant(I64, 1))
        key.add_incoming(following, loop)
        for phis, begins, ends in zip(old, first, new, strict=True):
            for phi, begin, end in zip(phis, begins, ends, strict=True):
                phi.add_incoming(begin, before)
                phi.add_incoming(end, loop)
        builder.cbranch(builder.icmp_signed("<", following, given["n_keys"]), loop, after)

        builder.position_at_end(after)
        for row_places, totals in zip(places, new, strict=True):
            for place, total in zip(row_places, totals, strict=True):
                builder.store(total, place).align = 4

    def _values(self, start: ir.Value, number: int) -> ir.Value:
        place = self._vector_place(self.given["values"], start, number, self.n_bytes, element(self.dtype))
        return widened(self.builder, self._load(place, self.n_bytes), self.dtype)

    def _share(self, row: ir.Value, key: ir.Value) -> ir.Value:
        """One probability in all lanes."""
        builder, kind = self.builder, vector(F32, VALUE_LANES)
        value = builder.load(builder.inttoptr(self._offset(row, key, 4), F32.as_pointer()))
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return builder.shuffle_vector(
            one, ir.Constant(kind, ir.Undefined), ir.Constant(vector(I32, VALUE_LANES), [0] * VALUE_LANES)
        )

    def _multiply_add(self, share: ir.Value, values: ir.Value, total: ir.Value) -> ir.Value:
        kind = total.type
        return call_llvm(self.builder, f"llvm.fma.v{kind.count}f32", kind, [kind] * 3, [share, values, total])

    def _load(self, place: ir.Value, align: int) -> ir.Value:
        value = self.builder.load(place)
        value.align = align
        return value

    def _vector_place(self, base: ir.Value, offset: ir.Value, number: int, n_bytes: int, kind: ir.Type) -> ir.Value:
        start = self.builder.add(self._offset(base, offset, n_bytes), ir.Constant(I64, number * VALUE_LANES * n_bytes))
        return self.builder.inttoptr(start, vector(kind, VALUE_LANES).as_pointer())

    def _offset(self, base: ir.Value, offset: ir.Value, n_bytes: int) -> ir.Value:
        return self.builder.add(base, self.builder.mul(offset, ir.Constant(I64, n_bytes)))

    def _times(self, value: ir.Value, factor: int) -> ir.Value:
        return self.builder.mul(value, ir.Constant(I64, factor))
