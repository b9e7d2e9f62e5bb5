"""Small pieces of LLVM vector code, and numba intrinsics made of them.

Element types are named by the array's dtype, since numba has neither bfloat16 nor (on CPUs) float16:

    uint16   the bits of a bfloat16
    int16    the bits of a float16
    float32  itself
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()


class BFloat(ir.types.Type):
    """LLVM's ``bfloat``, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

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
    """Whether this CPU multiplies tiles of bfloat16 (AMX), which torch's attention uses."""
    return "amx-bf16" in cpu_features()


def has_vector_512() -> bool:
    """Whether this CPU has 512-bit vectors, and 32 of them."""
    return "avx512f" in cpu_features()


def lanes() -> int:
    """float32 elements of the vectors to compute with."""
    return 16 if has_vector_512() else 8


def element(dtype: Any) -> ir.Type:
    """The LLVM type of an element."""
    return {types.uint16: I16, types.int16: ir.HalfType(), types.float32: F32}[dtype]


def vector(element: ir.Type, count: int) -> ir.VectorType:
    """The type of ``count`` elements."""
    return ir.VectorType(element, count)


def shuffle(builder: ir.IRBuilder, left: ir.Value, right: ir.Value, lanes: list[int]) -> ir.Value:
    """The given lanes of two vectors, one after the other."""
    return builder.shuffle_vector(left, right, ir.Constant(vector(I32, len(lanes)), lanes))


def fold_four(builder: ir.IRBuilder, sums: list[ir.Value]) -> ir.Value:
    """Four accumulators of 16 or 8 lanes -> one vector with their four sums."""
    parts: list[ir.Value | None] = list(sums)
    width = sums[0].type.count
    while width > 1:
        parts += [None] * (len(parts) % 2)
        parts = [_fold_pair(builder, parts[i], parts[i + 1], width) for i in range(0, len(parts), 2)]
        width //= 2
    return parts[0]


def _fold_pair(builder: ir.IRBuilder, left: ir.Value, right: ir.Value | None, width: int) -> ir.Value:
    """Adds the halves of each group of ``width`` lanes; the groups of ``right`` follow those of ``left``."""
    count = left.type.count * (1 if right is None else 2)
    groups = [range(start, start + width) for start in range(0, count, width)]
    other = ir.Constant(left.type, ir.Undefined) if right is None else right
    low = [lane for group in groups for lane in group[: width // 2]]
    high = [lane for group in groups for lane in group[width // 2 :]]
    return builder.fadd(shuffle(builder, left, other, low), shuffle(builder, left, other, high))


def widened(builder: ir.IRBuilder, values: ir.Value, dtype: Any) -> ir.Value:
    """Elements of ``dtype``, vector or scalar, as float32: exact."""
    if dtype == types.float32:
        return values
    if dtype == types.int16:
        return builder.fpext(values, _like(values, F32))
    wide = builder.zext(values, _like(values, I32))
    return builder.bitcast(builder.shl(wide, _splat(wide.type, 16)), _like(values, F32))


def narrowed(builder: ir.IRBuilder, values: ir.Value, dtype: Any) -> ir.Value:
    """float32, vector or scalar, rounded to nearest even; NaN stays NaN. The same bits as torch's conversion."""
    if dtype == types.float32:
        return values
    if dtype == types.int16:
        return builder.fptrunc(values, _like(values, ir.HalfType()))
    bits = builder.bitcast(values, _like(values, I32))
    kind = bits.type
    odd = builder.and_(builder.lshr(bits, _splat(kind, 16)), _splat(kind, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _splat(kind, 0x7FFF))), _splat(kind, 16))
    is_nan = builder.fcmp_unordered("uno", values, values)
    return builder.trunc(builder.select(is_nan, _splat(kind, 0x7FC0), rounded), _like(values, I16))


def _like(values: ir.Value, element: ir.Type) -> ir.Type:
    return vector(element, values.type.count) if isinstance(values.type, ir.VectorType) else element


def _splat(kind: ir.Type, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def call_llvm(
    builder: ir.IRBuilder,
    name: str,
    result: ir.Type,
    kinds: list[ir.Type],
    values: list[ir.Value],
) -> ir.Value:
    """Calls an LLVM intrinsic."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, kinds), name)
    return builder.call(function, values)


@intrinsic
def widen(typing_context: Any, value: Any) -> Any:
    """A scalar uint16, int16 or float32 (see the module) as float32."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        kind = signature.args[0]
        (number,) = values
        return widened(
            builder,
            builder.bitcast(number, element(kind)) if kind == types.int16 else number,
            kind,
        )

    return types.float32(value), generate


@intrinsic
def narrow(typing_context: Any, value: Any, like: Any) -> Any:
    """A float32 rounded to the scalar type of ``like`` (see the module)."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        kind = signature.args[1]
        number = narrowed(builder, values[0], kind)
        return builder.bitcast(number, I16) if kind == types.int16 else number

    return like(types.float32, like), generate


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` in float32, rounded once."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return call_llvm(builder, "llvm.fma.f32", F32, [F32] * 3, list(values))

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def bits_of(typing_context: Any, value: Any) -> Any:
    """The bits of a float32 as int32."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.bitcast(values[0], I32)

    return types.int32(types.float32), generate


@intrinsic
def float_of(typing_context: Any, bits: Any) -> Any:
    """The float32 with these int32 bits."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.bitcast(values[0], F32)

    return types.float32(types.int32), generate


@intrinsic
def pointer_to(typing_context: Any, address: Any, like: Any) -> Any:
    """An integer address as a pointer to elements of the array dtype ``like``."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), generate  # type: ignore[attr-defined]


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Begins to read the cache line at an address, which need not be valid, into the second-level cache."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        pointer = builder.inttoptr(values[0], I8.as_pointer())
        read, into_l2, data = (ir.Constant(I32, value) for value in (0, 2, 1))
        kinds = [pointer.type, I32, I32, I32]
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), kinds, [pointer, read, into_l2, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def claim(typing_context: Any, counter: Any) -> Any:
    """Adds one to the int64 at an address, atomically; returns what it was."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        pointer = builder.inttoptr(values[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def finish(typing_context: Any, counter: Any) -> Any:
    """Adds one to the int64 at an address, after everything that this thread has written."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        pointer = builder.inttoptr(values[0], I64.as_pointer())
        builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "release")
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def finished(typing_context: Any, counter: Any) -> Any:
    """The int64 at an address; what was written before it was set can be read afterwards."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.load_atomic(builder.inttoptr(values[0], I64.as_pointer()), "acquire", 8)

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
