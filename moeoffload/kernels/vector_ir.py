"""The dot-product tile: LLVM vector code for a few rows times four weight rows, as a numba intrinsic.

Element types are named by the array's dtype, since numba has neither bfloat16 nor (on CPUs) float16:

    uint16   the bits of a bfloat16
    int16    the bits of a float16
    float32  itself

Every output element is one vector accumulator that runs over the inner dimension in order, folded at the end in a fixed
tree. So an output's bits depend on its two operands only, never on how many rows are computed together or which thread
does it.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()

WEIGHT_ROWS: Final = 4
"""Weight rows in a tile: their accumulators fold into one vector of four outputs."""


class _BFloat(ir.types.Type):
    """LLVM's ``bfloat``, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


@functools.cache
def cpu_features() -> frozenset[str]:
    """What the code generator may use here; empty when numba was told to generate code for another CPU."""
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES is not None:
        return frozenset()
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


def has_bf16_dot() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 into float32 accumulators (AVX512-BF16)."""
    return "avx512bf16" in cpu_features()


def has_matrix_unit() -> bool:
    """Whether this CPU has a bfloat16 matrix unit that torch's products use and this tile does not (AMX)."""
    return "amx-bf16" in cpu_features()


@functools.cache
def tile_rows() -> int:
    """Most rows of a tile, so that its accumulators stay in registers."""
    return 6 if "avx512f" in cpu_features() else 2


def _lanes() -> int:
    return 16 if "avx512f" in cpu_features() else 8


def _element(dtype: Any) -> ir.Type:
    return {types.uint16: _I16, types.int16: ir.HalfType(), types.float32: _F32}[dtype]


def _vector(element: ir.Type, count: int) -> ir.VectorType:
    return ir.VectorType(element, count)


def _shuffle(builder: ir.IRBuilder, left: ir.Value, right: ir.Value, lanes: list[int]) -> ir.Value:
    return builder.shuffle_vector(left, right, ir.Constant(_vector(_I32, len(lanes)), lanes))


def _fold_four(builder: ir.IRBuilder, sums: list[ir.Value]) -> ir.Value:
    """Four accumulators of 16 or 8 lanes -> one vector with their four sums."""
    lanes = sums[0].type.count
    parts = sums
    while lanes > 1:
        half = lanes // 2
        if len(parts) > 1:
            parts = [_fold_pair(builder, parts[i], parts[i + 1], lanes) for i in range(0, len(parts), 2)]
        else:
            parts = [_fold_pair(builder, parts[0], None, lanes)]
        lanes = half
    return parts[0]


def _fold_pair(builder: ir.IRBuilder, left: ir.Value, right: ir.Value | None, lanes: int) -> ir.Value:
    """Adds the halves of each group of ``lanes`` lanes; the groups of ``right`` follow those of ``left``."""
    count = left.type.count * (2 if right is not None else 1)
    groups = [range(start, start + lanes) for start in range(0, count, lanes)]
    other = right if right is not None else ir.Constant(left.type, ir.Undefined)
    low = [lane for group in groups for lane in group[: lanes // 2]]
    high = [lane for group in groups for lane in group[lanes // 2 :]]
    return builder.fadd(_shuffle(builder, left, other, low), _shuffle(builder, left, other, high))


def _widen(builder: ir.IRBuilder, values: ir.Value, dtype: Any) -> ir.Value:
    """Elements of ``dtype``, vector or scalar, as float32: exact."""
    if dtype == types.float32:
        return values
    if dtype == types.int16:
        return builder.fpext(values, _like(values, _F32))
    wide = builder.zext(values, _like(values, _I32))
    return builder.bitcast(builder.shl(wide, _splat(wide.type, 16)), _like(values, _F32))


def _narrow(builder: ir.IRBuilder, values: ir.Value, dtype: Any) -> ir.Value:
    """float32, vector or scalar, rounded to nearest even; NaN stays NaN. The same bits as torch's conversion."""
    if dtype == types.float32:
        return values
    if dtype == types.int16:
        return builder.fptrunc(values, _like(values, ir.HalfType()))
    bits = builder.bitcast(values, _like(values, _I32))
    kind = bits.type
    odd = builder.and_(builder.lshr(bits, _splat(kind, 16)), _splat(kind, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _splat(kind, 0x7FFF))), _splat(kind, 16))
    is_nan = builder.fcmp_unordered("uno", values, values)
    return builder.trunc(builder.select(is_nan, _splat(kind, 0x7FC0), rounded), _like(values, _I16))


def _like(values: ir.Value, element: ir.Type) -> ir.Type:
    return _vector(element, values.type.count) if isinstance(values.type, ir.VectorType) else element


def _splat(kind: ir.Type, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


class _Tile:
    """Writes the code of one tile. All addresses are integers; strides and offsets are in bytes."""

    def __init__(self, builder: ir.IRBuilder, weight: Any, row: Any, weights: list[ir.Value], rows: list[ir.Value]):
        self.builder = builder
        self.weight, self.row = weight, row
        self.weights, self.rows = weights, rows
        self.paired = row == types.uint16
        self.step = 32 if self.paired else _lanes()
        self.zero = ir.Constant(_vector(_F32, 16 if self.paired else _lanes()), None)

    def sums(self, inner: ir.Value) -> list[list[ir.Value]]:
        """Accumulators [row][weight row] over ``inner`` elements."""
        builder = self.builder
        whole = builder.and_(inner, ir.Constant(_I64, -self.step))
        values = self._loop(whole)
        return self._tail(values, whole, inner)

    def _loop(self, whole: ir.Value) -> list[list[ir.Value]]:
        builder, zero = self.builder, self.zero
        before = builder.block
        loop = builder.append_basic_block("tile.loop")
        after = builder.append_basic_block("tile.after")
        is_short = builder.icmp_signed("==", whole, ir.Constant(_I64, 0))
        builder.cbranch(is_short, after, loop)

        builder.position_at_end(loop)
        index = builder.phi(_I64)
        index.add_incoming(ir.Constant(_I64, 0), before)
        old = [[builder.phi(zero.type) for _ in self.weights] for _ in self.rows]
        new = self._step(old, index, None)
        following = builder.add(index, ir.Constant(_I64, self.step))
        index.add_incoming(following, loop)
        for was, now in zip(_flat(old), _flat(new), strict=True):
            was.add_incoming(zero, before)
            was.add_incoming(now, loop)
        builder.cbranch(builder.icmp_signed("<", following, whole), loop, after)

        builder.position_at_end(after)
        return self._join(new, loop, [[zero] * len(self.weights)] * len(self.rows), before)

    def _tail(self, values: list[list[ir.Value]], whole: ir.Value, inner: ir.Value) -> list[list[ir.Value]]:
        builder = self.builder
        before = builder.block
        tail = builder.append_basic_block("tile.tail")
        done = builder.append_basic_block("tile.done")
        builder.cbranch(builder.icmp_signed("<", whole, inner), tail, done)
        builder.position_at_end(tail)
        more = self._step(values, whole, builder.sub(inner, whole))
        builder.branch(done)
        builder.position_at_end(done)
        return self._join(more, tail, values, before)

    def _join(
        self, some: list[list[ir.Value]], end: ir.Block, others: list[list[ir.Value]], before: ir.Block
    ) -> list[list[ir.Value]]:
        joined = [[self.builder.phi(self.zero.type) for _ in self.weights] for _ in self.rows]
        for phi, one, other in zip(_flat(joined), _flat(some), _flat(others), strict=True):
            phi.add_incoming(one, end)
            phi.add_incoming(other, before)
        return joined

    def _step(self, old: list[list[ir.Value]], index: ir.Value, left: ir.Value | None) -> list[list[ir.Value]]:
        """One vector of every operand; with ``left`` only so many elements of it, the rest zero."""
        weights = [self._load(address, self.weight, index, left) for address in self.weights]
        new = []
        for sums, address in zip(old, self.rows, strict=True):
            row = self._load(address, self.row, index, left)
            new.append([self._multiply_add(row, w, total) for w, total in zip(weights, sums, strict=True)])
        return new

    def _load(self, address: ir.Value, dtype: Any, index: ir.Value, left: ir.Value | None) -> ir.Value:
        builder = self.builder
        element = _element(dtype)
        n_bytes = dtype.bitwidth // 8
        kind = _vector(_BFloat() if self.paired else element, self.step)
        place = builder.add(address, builder.mul(index, ir.Constant(_I64, n_bytes)))
        if left is not None:
            # What lies behind the end may be another row, NaN, or no memory at all.
            padded = cgutils.alloca_once(builder, ir.ArrayType(element, self.step))
            builder.store(ir.Constant(padded.type.pointee, None), padded)
            source = builder.inttoptr(place, element.as_pointer())
            cgutils.raw_memcpy(builder, padded, source, left, n_bytes)
            place = builder.ptrtoint(padded, _I64)
        values = builder.load(builder.inttoptr(place, kind.as_pointer()))
        values.align = n_bytes
        return values if self.paired else _widen(builder, values, dtype)

    def _multiply_add(self, row: ir.Value, weights: ir.Value, total: ir.Value) -> ir.Value:
        kind = total.type
        if self.paired:
            pair = _vector(_BFloat(), 32)
            return _call(
                self.builder, "llvm.x86.avx512bf16.dpbf16ps.512", kind, [kind, pair, pair], [total, weights, row]
            )
        return _call(self.builder, f"llvm.fma.v{kind.count}f32", kind, [kind] * 3, [weights, row, total])


def _flat(values: list[list[Any]]) -> list[Any]:
    return [value for some in values for value in some]


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, kinds: list[ir.Type], values: list[ir.Value]) -> ir.Value:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, kinds), name)
    return builder.call(function, values)


@intrinsic(prefer_literal=True)
def dot_tile(
    typing_context: Any,
    n_rows: Any,
    weights: Any,
    weight_row: Any,
    inner: Any,
    rows: Any,
    row_index: Any,
    first: Any,
    bias: Any,
    bias_mode: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """``out[first + m, weight_row + n] = dot(rows[row_index[first + m]], weights[weight_row + n])`` for n < 4.

    Args:
        n_rows: a constant, how many m there are.
        weights: flat, rows of ``inner`` elements.
        weight_row: the first of the four weight rows.
        rows: flat, rows of ``inner`` elements, uint16 (bfloat16 weights, has_bf16_dot) or float32.
        row_index: int32, the row for each output row.
        first: first output row.
        bias: flat, elements like ``out``, begins at the first weight row's.
        bias_mode: 0 no bias, 1 added in float32, 2 added to the rounded product and rounded again.
        out: flat, rounded to its element type.
        out_stride: elements from one output row to the next.
    """
    del typing_context
    if not isinstance(n_rows, types.IntegerLiteral):
        return None
    count = n_rows.literal_value
    signature = types.void(n_rows, weights, weight_row, inner, rows, row_index, first, bias, bias_mode, out, out_stride)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        places = {"weights": 1, "rows": 4, "index": 5, "bias": 7, "out": 9}
        kinds = {name: signature.args[i] for name, i in places.items()}
        base = {
            name: builder.ptrtoint(context.make_array(kinds[name])(context, builder, values[i]).data, _I64)
            for name, i in places.items()
        }
        weight_row, inner, first, bias_mode, out_stride = (values[i] for i in (2, 3, 6, 8, 10))

        def place(start: ir.Value, offset: ir.Value, dtype: Any) -> ir.Value:
            return builder.add(start, builder.mul(offset, ir.Constant(_I64, dtype.bitwidth // 8)))

        def plus(value: ir.Value, constant: int) -> ir.Value:
            return builder.add(value, ir.Constant(_I64, constant))

        weight_type, row_type, out_type = (kinds[name].dtype for name in ("weights", "rows", "out"))
        weight_at = [
            place(base["weights"], builder.mul(plus(weight_row, n), inner), weight_type) for n in range(WEIGHT_ROWS)
        ]
        row_at = []
        for m in range(count):
            at = builder.inttoptr(place(base["index"], plus(first, m), types.int32), _I32.as_pointer())
            index = builder.zext(builder.load(at), _I64)
            row_at.append(place(base["rows"], builder.mul(index, inner), row_type))

        sums = _Tile(builder, weight_type, row_type, weight_at, row_at).sums(inner)

        element = _element(out_type) if out_type == types.float32 else _I16
        four = _vector(element, WEIGHT_ROWS)
        folded = [_fold_four(builder, some) for some in sums]
        folded = _add_bias(builder, folded, bias_mode, place(base["bias"], weight_row, out_type), out_type)
        for m, some in enumerate(folded):
            at = place(base["out"], builder.add(builder.mul(plus(first, m), out_stride), weight_row), out_type)
            rounded = builder.bitcast(_narrow(builder, some, out_type), four)
            builder.store(rounded, builder.inttoptr(at, four.as_pointer())).align = out_type.bitwidth // 8
        return context.get_dummy_value()

    return signature, generate


def _add_bias(
    builder: ir.IRBuilder, sums: list[ir.Value], mode: ir.Value, address: ir.Value, dtype: Any
) -> list[ir.Value]:
    before = builder.block
    adds = builder.append_basic_block("tile.bias")
    done = builder.append_basic_block("tile.biased")
    builder.cbranch(builder.icmp_signed("==", mode, ir.Constant(mode.type, 0)), done, adds)
    builder.position_at_end(adds)
    four = _vector(_element(dtype), WEIGHT_ROWS)
    stored = builder.load(builder.inttoptr(address, four.as_pointer()))
    stored.align = dtype.bitwidth // 8
    bias = _widen(builder, stored, dtype)
    is_rounded = builder.icmp_signed("==", mode, ir.Constant(mode.type, 2))
    biased = []
    for some in sums:
        rounded = _widen(builder, _narrow(builder, some, dtype), dtype)
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


@intrinsic
def widen(typing_context: Any, value: Any) -> Any:
    """A scalar uint16, int16 or float32 (see the module) as float32."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        kind = signature.args[0]
        (number,) = values
        return _widen(builder, builder.bitcast(number, _element(kind)) if kind == types.int16 else number, kind)

    return types.float32(value), generate


@intrinsic
def narrow(typing_context: Any, value: Any, like: Any) -> Any:
    """A float32 rounded to the scalar type of ``like`` (see the module)."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        kind = signature.args[1]
        number = _narrow(builder, values[0], kind)
        return builder.bitcast(number, _I16) if kind == types.int16 else number

    return like(types.float32, like), generate


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` in float32, rounded once."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return _call(builder, "llvm.fma.f32", _F32, [_F32] * 3, list(values))

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def bits_of(typing_context: Any, value: Any) -> Any:
    """The bits of a float32 as int32."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.bitcast(values[0], _I32)

    return types.int32(types.float32), generate


@intrinsic
def float_of(typing_context: Any, bits: Any) -> Any:
    """The float32 with these int32 bits."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.bitcast(values[0], _F32)

    return types.float32(types.int32), generate


@intrinsic
def pointer_to(typing_context: Any, address: Any, like: Any) -> Any:
    """An integer address as a pointer to elements of the array dtype ``like``."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), generate  # type: ignore[attr-defined]


@intrinsic
def claim(typing_context: Any, counter: Any) -> Any:
    """Adds one to the int64 at an address, atomically; returns what it was."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        pointer = builder.inttoptr(values[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(_I64, 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def call_address(typing_context: Any, address: Any) -> Any:
    """Calls the C function ``void f(void)`` at an address."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        function = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.inttoptr(values[0], function.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), generate
