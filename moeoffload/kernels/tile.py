"""The dot-product tile: a few rows times four weight rows, as a numba intrinsic in LLVM vector code.

Every output is one vector accumulator that runs over the inner dimension in order, folded at the end in a fixed tree.
So an output's bits depend on its two operands only, never on how many rows are computed together, in which order of
loops, or by which thread.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from moeoffload.kernels.vector_ir import (
    F32,
    I8,
    I32,
    I64,
    BFloat,
    call_llvm,
    element,
    fold_four,
    has_vector_512,
    lanes,
    narrowed,
    vector,
    widened,
)

WEIGHT_ROWS: Final = 4
"""Weight rows in a tile: their accumulators fold into one vector of four outputs."""

TILE_ROWS: Final = 6 if has_vector_512() else 2
"""Most rows of a tile, so that its accumulators stay in registers."""

# Measured: how far ahead of the four streams of weights to prefetch.
_AHEAD_BYTES: Final = 1280

# Where a tile's weights are.
IN_CACHE: Final = 0
"""An earlier tile has brought them."""
IN_MEMORY: Final = 1
"""They are prefetched, and used by more tiles."""
ONCE: Final = 2
"""They are prefetched past the outer caches, since nobody uses them again: what lies there, the interpreter for one,
stays. Measured: a decode step takes 17% less."""
# The cache to prefetch into, as LLVM counts. What only later tiles use would drive the rows from the first level.
_LOCALITY: Final = {IN_CACHE: 2, IN_MEMORY: 3, ONCE: 0}

Sums = list[list[ir.Value]]


class _Tile:
    """Writes the code of one tile; accumulators are [row][weight row]. Addresses are integers."""

    def __init__(
        self,
        builder: ir.IRBuilder,
        weight_type: Any,
        row_type: Any,
        weights: list[ir.Value],
        rows: list[ir.Value],
        ahead: list[ir.Value],
        source: int,
    ) -> None:
        self.builder = builder
        self.source = source
        self.weight_type, self.row_type = weight_type, row_type
        self.weights, self.rows = weights, rows
        self.ahead = ahead
        self.paired = row_type == types.uint16
        self.step = 32 if self.paired else lanes()
        # A single row has so little to do per vector of weights that the loop itself counts.
        self.unrolled = 2 if len(rows) == 1 else 1
        self.zero = ir.Constant(vector(F32, lanes()), None)

    def sums(self, inner: ir.Value) -> Sums:
        """The accumulators over ``inner`` elements."""
        builder = self.builder
        looped = builder.and_(inner, ir.Constant(I64, -self.step * self.unrolled))
        whole = builder.and_(inner, ir.Constant(I64, -self.step))
        values = self._loop(looped)
        if self.unrolled > 1:
            values = self._maybe(values, builder.icmp_signed("<", looped, whole), looped, None)
        return self._maybe(values, builder.icmp_signed("<", whole, inner), whole, builder.sub(inner, whole))

    def _loop(self, end: ir.Value) -> Sums:
        builder, zero = self.builder, self.zero
        before = builder.block
        loop = builder.append_basic_block("tile.loop")
        after = builder.append_basic_block("tile.after")
        is_short = builder.icmp_signed("==", end, ir.Constant(I64, 0))
        builder.cbranch(is_short, after, loop)

        builder.position_at_end(loop)
        index = builder.phi(I64)
        index.add_incoming(ir.Constant(I64, 0), before)
        old = [[builder.phi(zero.type) for _ in self.weights] for _ in self.rows]
        new, following = old, index
        for _ in range(self.unrolled):
            for address in self.ahead:
                self._prefetch(address, following)
            new = self._step(new, following, None)
            following = builder.add(following, ir.Constant(I64, self.step))
        index.add_incoming(following, loop)
        for was, now in zip(_flat(old), _flat(new), strict=True):
            was.add_incoming(zero, before)
            was.add_incoming(now, loop)
        builder.cbranch(builder.icmp_signed("<", following, end), loop, after)

        builder.position_at_end(after)
        return self._join(new, loop, [[zero] * len(self.weights)] * len(self.rows), before)

    def _maybe(self, values: Sums, condition: ir.Value, index: ir.Value, left: ir.Value | None) -> Sums:
        """One more step if a condition holds."""
        builder = self.builder
        before = builder.block
        more = builder.append_basic_block("tile.more")
        done = builder.append_basic_block("tile.done")
        builder.cbranch(condition, more, done)
        builder.position_at_end(more)
        new = self._step(values, index, left)
        builder.branch(done)
        builder.position_at_end(done)
        return self._join(new, more, values, before)

    def _join(self, some: Sums, end: ir.Block, others: Sums, before: ir.Block) -> Sums:
        joined = [[self.builder.phi(value.type) for value in row] for row in some]
        for phi, one, other in zip(_flat(joined), _flat(some), _flat(others), strict=True):
            phi.add_incoming(one, end)
            phi.add_incoming(other, before)
        return joined

    def _step(self, old: Sums, index: ir.Value, left: ir.Value | None) -> Sums:
        """One vector of every operand; with ``left`` only so many elements of it, the rest zero."""
        values = [self._load(address, self.weight_type, index, left) for address in self.weights]
        new = []
        for sums, address in zip(old, self.rows, strict=True):
            row = self._load(address, self.row_type, index, left)
            new.append([self._multiply_add(row, value, total) for value, total in zip(values, sums, strict=True)])
        return new

    def _load(self, address: ir.Value, dtype: Any, index: ir.Value, left: ir.Value | None) -> ir.Value:
        builder = self.builder
        n_bytes = dtype.bitwidth // 8
        kind = vector(BFloat() if self.paired else element(dtype), self.step)
        place = builder.add(address, builder.mul(index, ir.Constant(I64, n_bytes)))
        if left is not None:
            # What lies behind the end may be another row, NaN, or no memory at all.
            padded = cgutils.alloca_once(builder, ir.ArrayType(element(dtype), self.step))
            builder.store(ir.Constant(padded.type.pointee, None), padded)
            source = builder.inttoptr(place, element(dtype).as_pointer())
            cgutils.raw_memcpy(builder, padded, source, left, n_bytes)
            place = builder.ptrtoint(padded, I64)
        values = builder.load(builder.inttoptr(place, kind.as_pointer()))
        values.align = n_bytes
        return values if self.paired else widened(builder, values, dtype)

    def _multiply_add(self, row: ir.Value, weights: ir.Value, total: ir.Value) -> ir.Value:
        kind = total.type
        if self.paired:
            pairs = weights.type
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            return call_llvm(self.builder, name, kind, [kind, pairs, pairs], [total, weights, row])
        return call_llvm(self.builder, f"llvm.fma.v{kind.count}f32", kind, [kind] * 3, [weights, row, total])

    def _prefetch(self, address: ir.Value, index: ir.Value) -> None:
        builder = self.builder
        offset = builder.mul(index, ir.Constant(I64, self.weight_type.bitwidth // 8))
        pointer = builder.inttoptr(builder.add(address, offset), I8.as_pointer())
        read, locality, data = (ir.Constant(I32, value) for value in (0, _LOCALITY[self.source], 1))
        kinds = [pointer.type, I32, I32, I32]
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), kinds, [pointer, read, locality, data])


def _flat(values: Sums) -> list[ir.Value]:
    return [value for some in values for value in some]


_NAMES: Final = (
    "weights",
    "weight_stride",
    "weight_row",
    "row_step",
    "inner",
    "ahead",
    "rows",
    "row_index",
    "first",
    "bias",
    "bias_mode",
    "out",
    "out_stride",
)
_ARRAYS: Final = ("weights", "rows", "row_index", "bias", "out")


@intrinsic
def dot_tile(
    typing_context: Any,
    n_rows: Any,
    source: Any,
    weights: Any,
    weight_stride: Any,
    weight_row: Any,
    row_step: Any,
    inner: Any,
    ahead: Any,
    rows: Any,
    row_index: Any,
    first: Any,
    bias: Any,
    bias_mode: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """``out[first + m, w] = dot(rows[row_index[first + m]], weights[w])`` for w = weight_row + n * row_step, n < 4.

    Tiles whose ``weight_row`` follow each other read four streams of memory when ``row_step`` is large: that is faster
    than one stream, and than four rows that lie together.

    Args:
        n_rows: how many m there are, 1 to TILE_ROWS.
        source: IN_CACHE, IN_MEMORY or ONCE.
        weights: flat, rows of ``inner`` elements.
        weight_stride: elements from one of those rows to the next.
        weight_row: the first of the four weight rows.
        row_step: from one of them to the next.
        ahead: if IN_CACHE, a weight row that is prefetched meanwhile, with the one ``row_step`` after it.
        rows: flat, rows of ``inner`` elements, uint16 (bfloat16 weights, has_bf16_dot) or float32.
        row_index: int32, the row for each output row.
        first: first output row.
        bias: flat, one element like ``out``'s per weight row.
        bias_mode: 0 no bias, 1 added in float32, 2 added to the rounded product and rounded again.
        out: flat, rounded to its element type.
        out_stride: elements from one output row to the next.
    """
    del typing_context
    arguments = (
        weights,
        weight_stride,
        weight_row,
        row_step,
        inner,
        ahead,
        rows,
        row_index,
        first,
        bias,
        bias_mode,
        out,
        out_stride,
    )

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, all_values: Any) -> ir.Value:
        n_rows, source = all_values[:2]
        values = dict(zip(_NAMES, all_values[2:], strict=True))
        kinds = dict(zip(_NAMES, signature.args[2:], strict=True))
        for name in _ARRAYS:
            array = context.make_array(kinds[name])(context, builder, values[name])
            values[name] = builder.ptrtoint(array.data, I64)
        call = _Call(builder, values, {name: kinds[name].dtype for name in _ARRAYS})

        done = builder.append_basic_block("tile.end")
        by_source = builder.switch(source, done)
        for place in (IN_CACHE, IN_MEMORY, ONCE):
            block = builder.append_basic_block(f"tile.source.{place}")
            by_source.add_case(ir.Constant(source.type, place), block)
            builder.position_at_end(block)
            choice = builder.switch(n_rows, done)
            for count in range(1, TILE_ROWS + 1):
                case = builder.append_basic_block(f"tile.{count}")
                choice.add_case(ir.Constant(n_rows.type, count), case)
                builder.position_at_end(case)
                call.emit(count, place)
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, *arguments), generate


class _Call:
    """One use of `dot_tile`: writes the code for any number of rows."""

    def __init__(self, builder: ir.IRBuilder, values: dict[str, ir.Value], kinds: dict[str, Any]) -> None:
        self.builder = builder
        self.values = values
        self.kinds = kinds

    def emit(self, n_rows: int, source: int) -> None:
        """The code for ``n_rows`` rows."""
        builder, values, kinds = self.builder, self.values, self.kinds
        inner, first, step = values["inner"], values["first"], values["row_step"]
        stride = values["weight_stride"]
        columns = self._four(values["weight_row"], step)
        weights = [self._place("weights", builder.mul(column, stride)) for column in columns]
        rows = []
        for m in range(n_rows):
            index = builder.load(builder.inttoptr(self._place("row_index", self._plus(first, m)), I32.as_pointer()))
            rows.append(self._place("rows", builder.mul(builder.zext(index, I64), inner)))
        if source != IN_CACHE:
            ahead = [self._plus(weight, _AHEAD_BYTES) for weight in weights]
        else:
            ahead = [self._place("weights", builder.mul(row, stride)) for row in self._four(values["ahead"], step)[:2]]

        tile = _Tile(builder, kinds["weights"], kinds["rows"], weights, rows, ahead, source)
        folded = [fold_four(builder, sums) for sums in tile.sums(inner)]
        biases = [builder.inttoptr(self._place("bias", column), self._kind.as_pointer()) for column in columns]
        folded = _add_bias(builder, folded, values["bias_mode"], biases, kinds["out"])
        for m, sums in enumerate(folded):
            start = builder.mul(self._plus(first, m), values["out_stride"])
            rounded = narrowed(builder, sums, kinds["out"])
            for n, column in enumerate(columns):
                pointer = builder.inttoptr(self._place("out", builder.add(start, column)), self._kind.as_pointer())
                value = builder.extract_element(rounded, ir.Constant(I32, n))
                builder.store(value, pointer).align = kinds["out"].bitwidth // 8

    @property
    def _kind(self) -> ir.Type:
        return element(self.kinds["out"])

    def _four(self, start: ir.Value, step: ir.Value) -> list[ir.Value]:
        result = [start]
        for _ in range(WEIGHT_ROWS - 1):
            result.append(self.builder.add(result[-1], step))
        return result

    def _place(self, name: str, offset: ir.Value) -> ir.Value:
        n_bytes = ir.Constant(I64, self.kinds[name].bitwidth // 8)
        return self.builder.add(self.values[name], self.builder.mul(offset, n_bytes))

    def _plus(self, value: ir.Value, constant: int) -> ir.Value:
        return self.builder.add(value, ir.Constant(I64, constant))


def _add_bias(
    builder: ir.IRBuilder, sums: list[ir.Value], mode: ir.Value, addresses: list[ir.Value], dtype: Any
) -> list[ir.Value]:
    before = builder.block
    adds = builder.append_basic_block("tile.bias")
    done = builder.append_basic_block("tile.biased")
    builder.cbranch(builder.icmp_signed("==", mode, ir.Constant(mode.type, 0)), done, adds)
    builder.position_at_end(adds)
    stored = ir.Constant(vector(element(dtype), WEIGHT_ROWS), ir.Undefined)
    for n, address in enumerate(addresses):
        stored = builder.insert_element(stored, builder.load(address), ir.Constant(I32, n))
    bias = widened(builder, stored, dtype)
    is_rounded = builder.icmp_signed("==", mode, ir.Constant(mode.type, 2))
    biased = []
    for some in sums:
        rounded = widened(builder, narrowed(builder, some, dtype), dtype)
        biased.append(builder.fadd(builder.select(is_rounded, rounded, some), bias))
    builder.branch(done)
    builder.position_at_end(done)
    joined = []
    for some, other in zip(sums, biased, strict=True):
        value = builder.phi(some.type)
        value.add_incoming(some, before)
        value.add_incoming(other, adds)
        joined.append(value)
    return joined
