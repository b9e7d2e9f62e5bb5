"""The matrix unit's tile (Intel AMX): rows of bfloat16 times rows of weights, as numba intrinsics in LLVM code.

Weights lie as they are: 16 rows of them, 32 elements of each, are one operand. The other one is made of up to 16 rows
of activations that were packed: pairs of neighbours in the inner dimension of one row beside those of the next. An
output is one element of an accumulator that runs over the inner dimension in order, so its bits depend on its two
operands only, as with `tile`, though they are not the same bits.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS, LDTILECFG, TILELOADD; Linux
Documentation/arch/x86/xstate.rst for the permission.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from itertools import product
from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from moeoffload.kernels.vector_ir import (
    F32,
    I8,
    I16,
    I32,
    I64,
    call_llvm,
    has_matrix_unit,
    narrowed,
    shuffle,
    vector,
    widened,
)

MATRIX_ROWS: Final = 16
"""Rows of weights, and most rows of activations, of one accumulator."""
MATRIX_STEP: Final = 32
"""Elements of the inner dimension of one instruction."""
SCRATCH_BYTES: Final = 4 * 1024
"""Of the accumulators of `matrix_products`: (weight tile, row tile, 16 weight rows, 16 columns) float32."""

ACCUMULATOR_BYTES: Final = 1024
CONFIG_BYTES: Final = 64
STACK_BYTES: Final = SCRATCH_BYTES + CONFIG_BYTES

_LINE: Final = 64
STREAMS: Final = 8
"""Places from which on weights are prefetched at the same time. Measured: reading a decode step's weights is a fifth
faster than a sum over all of them, which the system prefetches."""
_STREAM_ROWS: Final = 2 * MATRIX_ROWS // STREAMS
# Numbers of the tile registers.
_SUMS: Final = (0, 1, 2, 3)
_WEIGHTS: Final = (4, 5)
_ROWS: Final = (6, 7)

_ARCH_PRCTL: Final = 158
_REQUEST_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18


@functools.cache
def may_use_matrix_unit() -> bool:
    """Whether this CPU has the unit and Linux lets this process use it; asks for that when first called."""
    if not has_matrix_unit() or platform.machine() != "x86_64" or sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    granted = libc.syscall(*map(ctypes.c_long, (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)))
    return bool(granted == 0)


def _register(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


def _pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type = I8) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())


def _number(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


@intrinsic
def stack_memory(typing_context: Any) -> Any:
    """Address of STACK_BYTES bytes, a multiple of 64, that are the calling function's while it runs."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        # Not cgutils' way, which fills it with zeros each time.
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(I8, STACK_BYTES))
        memory.align = _LINE
        return builder.ptrtoint(memory, I64)

    return types.int64(), generate


@intrinsic
def begin_tiles(typing_context: Any, config: Any, columns: Any, more_columns: Any) -> Any:
    """Sets the unit up for row tiles of so many columns each, 1 to 16; ``config`` is the address of 64 bytes."""
    del typing_context, config, columns, more_columns

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        config, *columns = values
        block = ir.ArrayType(I8, CONFIG_BYTES)
        builder.store(ir.Constant(block, None), _pointer(builder, config, block))
        builder.store(_register(1), _pointer(builder, config))  # palette
        widths = [builder.trunc(builder.mul(count, _number(4)), I16) for count in columns]
        full = ir.Constant(I16, _LINE)
        by_register = {number: widths[number % 2] for number in (*_SUMS, *_ROWS)} | dict.fromkeys(_WEIGHTS, full)
        for number, width in by_register.items():
            builder.store(width, _pointer(builder, builder.add(config, _number(16 + 2 * number)), I16))
            builder.store(_register(MATRIX_ROWS), _pointer(builder, builder.add(config, _number(48 + number))))
        place = _pointer(builder, config)
        call_llvm(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [place.type], [place])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def end_tiles(typing_context: Any) -> Any:
    """Gives the unit back, so that the system need not save its registers."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        call_llvm(builder, "llvm.x86.tilerelease", ir.VoidType(), [], [])
        return context.get_dummy_value()

    return types.void(), generate


class _Products:
    """Writes the code of `matrix_products` for so many tiles of weights and of rows."""

    def __init__(self, builder: ir.IRBuilder, given: dict[str, ir.Value]) -> None:
        self.builder, self.given = builder, given

    def emit(self, n_weights: int, n_rows: int) -> None:
        builder, given = self.builder, self.given
        for w, r in product(range(n_weights), range(n_rows)):
            self._call("tilezero", [_register(_SUMS[2 * w + r])])
        before, loop, after = builder.block, *map(builder.append_basic_block, ("matrix.loop", "matrix.after"))
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(I64)
        step.add_incoming(_number(0), before)
        self._prefetch(step)
        start = builder.add(given["weights"], builder.mul(step, _number(_LINE)))
        for w in range(n_weights):
            tile = builder.add(start, builder.mul(given["weight_bytes"], _number(MATRIX_ROWS * w)))
            self._load(_WEIGHTS[w], tile, given["weight_bytes"])
        for r, (rows, columns) in enumerate((("rows", "columns"), ("more_rows", "more_columns"))[:n_rows]):
            width = builder.mul(given[columns], _number(4))
            tile = builder.add(given[rows], builder.mul(builder.mul(step, width), _number(MATRIX_ROWS)))
            self._load(_ROWS[r], tile, width)
        for w, r in product(range(n_weights), range(n_rows)):
            self._call("tdpbf16ps", [_register(n) for n in (_SUMS[2 * w + r], _WEIGHTS[w], _ROWS[r])])
        following = builder.add(step, _number(1))
        step.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, given["n_steps"]), loop, after)
        builder.position_at_end(after)
        for w, r in product(range(n_weights), range(n_rows)):
            place = _pointer(builder, builder.add(given["out"], _number(ACCUMULATOR_BYTES * (2 * w + r))))
            self._call("tilestored64", [_register(_SUMS[2 * w + r]), place, _number(_LINE)])

    def _prefetch(self, step: ir.Value) -> None:
        """The next lines of each stream ahead."""
        builder, given = self.builder, self.given
        before = builder.block
        head, body, after = map(builder.append_basic_block, ("ahead.head", "ahead.body", "ahead.after"))
        first = builder.mul(step, given["n_ahead"])
        end = builder.add(first, given["n_ahead"])
        builder.branch(head)
        builder.position_at_end(head)
        line = builder.phi(I64)
        line.add_incoming(first, before)
        builder.cbranch(builder.icmp_signed("<", line, end), body, after)
        builder.position_at_end(body)
        start = builder.add(given["ahead"], builder.mul(line, _number(_LINE)))
        read, locality, data = (ir.Constant(I32, value) for value in (0, 2, 1))
        for stream in range(STREAMS):
            skipped = builder.mul(given["weight_bytes"], _number(stream * _STREAM_ROWS))
            place = _pointer(builder, builder.add(start, skipped))
            kinds = [place.type, I32, I32, I32]
            call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), kinds, [place, read, locality, data])
        line.add_incoming(builder.add(line, _number(1)), body)
        builder.branch(head)
        builder.position_at_end(after)

    def _load(self, register: int, address: ir.Value, stride: ir.Value) -> None:
        self._call("tileloadd64", [_register(register), _pointer(self.builder, address), stride])

    def _call(self, name: str, values: list[ir.Value]) -> None:
        call_llvm(self.builder, f"llvm.x86.{name}", ir.VoidType(), [value.type for value in values], values)


_NAMES: Final = (
    "weights",
    "weight_bytes",
    "rows",
    "columns",
    "more_rows",
    "more_columns",
    "n_steps",
    "ahead",
    "n_ahead",
    "out",
)


@intrinsic
def matrix_products(
    typing_context: Any,
    n_weights: Any,
    n_rows: Any,
    weights: Any,
    weight_bytes: Any,
    rows: Any,
    columns: Any,
    more_rows: Any,
    more_columns: Any,
    n_steps: Any,
    ahead: Any,
    n_ahead: Any,
    out: Any,
) -> Any:
    """One or two tiles of 16 weight rows times one or two tiles of packed rows, between `begin_tiles` and `end_tiles`.

    Args:
        n_weights, n_rows: tiles of weights and of rows, 1 or 2 each.
        weights: address of the first weight row.
        weight_bytes: from one of them to the next.
        rows: address of (32 * n_steps / 2, columns) pairs of bfloat16.
        columns: as told to `begin_tiles`.
        more_rows, more_columns: the same of the second tile of rows.
        n_steps: elements of the inner dimension, divided by 32.
        ahead: address of 32 weight rows that are prefetched meanwhile, or of a later line of the first one.
        n_ahead: lines, for each of STREAMS parts of these rows, that are prefetched in each step.
        out: address of SCRATCH_BYTES bytes: of weight tile w and row tile r, at 1024 * (2 * w + r), (16, 16) float32,
            for each weight row its products with the rows in the first columns.
    """
    del typing_context, weights, weight_bytes, rows, columns, more_rows, more_columns, n_steps, ahead, n_ahead, out

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        n_weights, n_rows, *given = values
        code = _Products(builder, dict(zip(_NAMES, given, strict=True)))
        done = builder.append_basic_block("matrix.end")
        choice = builder.switch(builder.add(builder.mul(n_weights, _number(2)), n_rows), done)
        for w, r in product((1, 2), (1, 2)):
            block = builder.append_basic_block(f"matrix.{w}.{r}")
            choice.add_case(_number(2 * w + r), block)
            builder.position_at_end(block)
            code.emit(w, r)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 12), generate


def _transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """The 16 columns of 16 vectors of 16 lanes, in four rounds of exchanges between two vectors each."""
    for distance in (1, 2, 4, 8):
        low = [lane if not lane & distance else 16 + (lane ^ distance) for lane in range(16)]
        high = [lane ^ distance if not lane & distance else 16 + lane for lane in range(16)]
        new = list(rows)
        for at in (at for at in range(16) if not at & distance):
            one, other = rows[at], rows[at | distance]
            new[at] = shuffle(builder, one, other, low)
            new[at | distance] = shuffle(builder, one, other, high)
        rows = new
    return rows


def _first_lanes(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """The mask of the first ``count`` lanes of 16."""
    kind = vector(I32, 16)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), builder.trunc(count, I32), ir.Constant(I32, 0))
    counts = builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(kind, [0] * 16))
    return builder.icmp_signed("<", ir.Constant(kind, list(range(16))), counts)


@intrinsic
def pack_step(typing_context: Any, places: Any, at: Any, columns: Any, out: Any) -> Any:
    """16 pairs of each of 1 to 16 rows, packed.

    Args:
        places: address of 16 addresses of rows; those behind the last row are of some row.
        at: bytes from there to the first pair.
        columns: how many rows there are.
        out: address of (16, columns) pairs.
    """
    del typing_context, places, at, columns, out

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        places, at, columns, out = values
        kind = vector(I32, 16)
        rows = []
        for row in range(16):
            place = builder.load(_pointer(builder, builder.add(places, _number(8 * row)), I64))
            value = builder.load(_pointer(builder, builder.add(place, at), kind))
            value.align = 4
            rows.append(value)
        mask = _first_lanes(builder, columns)
        step = builder.mul(columns, _number(4))
        for pair, value in enumerate(_transposed(builder, rows)):
            target = _pointer(builder, builder.add(out, builder.mul(step, _number(pair))), kind)
            kinds = [kind, target.type, I32, mask.type]
            call_llvm(
                builder, "llvm.masked.store.v16i32.p0", ir.VoidType(), kinds, [value, target, ir.Constant(I32, 4), mask]
            )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def write_products(
    typing_context: Any, sums: Any, columns: Any, bias: Any, bias_mode: Any, out: Any, stride: Any
) -> Any:
    """Rounds one accumulator of `matrix_products` to bfloat16: ``out[row, weight row]`` for each column of it.

    Args:
        sums: address of (16 weight rows, 16 columns) float32.
        columns: how many of these count.
        bias: address of 16 bfloat16.
        bias_mode: as in `tile.dot_tile`.
        out: address of 16 bfloat16 of the first row.
        stride: bytes from one row to the next.
    """
    del typing_context, sums, columns, bias, bias_mode, out, stride

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        sums, columns, bias, bias_mode, out, stride = values
        kind, stored = vector(F32, 16), vector(I16, 16)
        lines = []
        for row in range(16):
            value = builder.load(_pointer(builder, builder.add(sums, _number(_LINE * row)), kind))
            value.align = _LINE
            lines.append(value)
        lines = _transposed(builder, lines)
        done = builder.append_basic_block("write.end")
        for row, value in enumerate(lines):
            block = builder.append_basic_block(f"write.{row}")
            builder.cbranch(builder.icmp_signed("<", _number(row), columns), block, done)
            builder.position_at_end(block)
            total = _biased(builder, value, bias, bias_mode)
            place = _pointer(builder, builder.add(out, builder.mul(stride, _number(row))), stored)
            builder.store(narrowed(builder, total, types.uint16), place).align = 2
        builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _biased(builder: ir.IRBuilder, sums: ir.Value, bias: ir.Value, mode: ir.Value) -> ir.Value:
    before = builder.block
    adds, done = builder.append_basic_block("bias"), builder.append_basic_block("biased")
    builder.cbranch(builder.icmp_signed("==", mode, _number(0)), done, adds)
    builder.position_at_end(adds)
    values = builder.load(_pointer(builder, bias, vector(I16, 16)))
    values.align = 2
    rounded = widened(builder, narrowed(builder, sums, types.uint16), types.uint16)
    base = builder.select(builder.icmp_signed("==", mode, _number(2)), rounded, sums)
    total = builder.fadd(base, widened(builder, values, types.uint16))
    builder.branch(done)
    builder.position_at_end(done)
    result = builder.phi(sums.type)
    result.add_incoming(sums, before)
    result.add_incoming(total, adds)
    return result
