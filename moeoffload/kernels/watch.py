"""Compiled loops that look for news again and again, without the interpreter lock.

A thread that is woken by another one answers 20 to 50 microseconds late, more on a virtual machine, whose idle cores
the hypervisor has to wake. One that looks all the time answers within one, and in compiled code it keeps neither the
interpreter lock from other threads nor, thanks to ``sched_yield``, the core from other processes.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from moeoffload.kernels.program import c_function, compile_entry, source_stamp
from moeoffload.kernels.vector_ir import I32, I64, call_address, call_llvm, finished

_LOOKS: Final = 16
"""Looks between two readings of the clock."""
_ROUNDS: Final = 64
"""Readings of the clock between two questions to the system; about 50 microseconds."""
_CLOCK_MONOTONIC: Final = 1
_RUSAGE_THREAD: Final = 1
_RUSAGE_LONGS: Final = 18
_RU_NIVCSW: Final = 17
"""Where ``struct rusage`` counts how often others were given the core although this thread could have gone on."""
_PAUSE: Final = "llvm.x86.sse2.pause" if platform.machine() in ("x86_64", "AMD64") else None


class Seen(IntEnum):
    """Why a watch ended."""

    NOTHING = 0
    """Its time was over."""
    NEWS = 1
    CROWDED = 2
    """Somebody else wants this core: looking on would keep them, perhaps the very peer, from working."""
    CALLED = 3
    """This process has something else to do for the thread that looks."""


@intrinsic
def _pause(typing_context: Any) -> Any:
    """Tells the core that this is a loop that waits."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        if _PAUSE is not None:
            call_llvm(builder, _PAUSE, ir.VoidType(), [], [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def clock_ns(typing_context: Any, clock_gettime: Any) -> Any:
    """CLOCK_MONOTONIC in nanoseconds, from the C function at an address."""
    del typing_context, clock_gettime

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        time = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
        function = ir.FunctionType(I32, [I32, time.type])
        builder.call(builder.inttoptr(values[0], function.as_pointer()), [ir.Constant(I32, _CLOCK_MONOTONIC), time])
        seconds, rest = (builder.extract_value(builder.load(time), part) for part in (0, 1))
        return builder.add(builder.mul(seconds, ir.Constant(I64, 1_000_000_000)), rest)

    return types.int64(types.int64), generate


@intrinsic
def _poll(typing_context: Any, poll: Any, descriptors: Any, count: Any) -> Any:
    """``poll(descriptors, count, 0)`` with the C function at an address."""
    del typing_context, poll, descriptors, count

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        function = ir.FunctionType(I32, [I64, I64, I32])
        pointer = builder.inttoptr(values[0], function.as_pointer())
        return builder.call(pointer, [values[1], values[2], ir.Constant(I32, 0)])

    return types.int32(types.int64, types.int64, types.int64), generate


@intrinsic
def times_displaced(typing_context: Any, getrusage: Any) -> Any:
    """How often the system has given this thread's core to others; from the C function at an address."""
    del typing_context, getrusage

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        # Zeros: a system that cannot tell has displaced nobody.
        usage = cgutils.alloca_once(builder, ir.ArrayType(I64, _RUSAGE_LONGS), zfill=True)
        function = ir.FunctionType(I32, [I32, usage.type])
        builder.call(builder.inttoptr(values[0], function.as_pointer()), [ir.Constant(I32, _RUSAGE_THREAD), usage])
        return builder.extract_value(builder.load(usage), _RU_NIVCSW)

    return types.int64(types.int64), generate


# A gap between two looks is a crowd only if the system says that others had the core. A hypervisor that takes a core
# away for a while is nobody whom looking on would keep from working, and a thread that sleeps on a virtual machine's
# core is late, and finds its caches empty.


@njit(nogil=True)
def look_for(
    address: int, value: int, call: int, limit_ns: int, crowded_ns: int, clock: int, yield_: int, getrusage: int
) -> int:
    """Looks until the int64 at ``address`` is ``value``, or the one at ``call`` is not 0; returns a `Seen`."""
    for _look in range(_LOOKS):
        if finished(address) == value:
            return 1
        _pause()
    displaced = times_displaced(getrusage)
    started = before = clock_ns(clock)
    rounds = 0
    while True:
        for _look in range(_LOOKS):
            if finished(address) == value:
                return 1
            _pause()
        if finished(call) != 0:
            return 3
        call_address(yield_)
        now = clock_ns(clock)
        if now - before > crowded_ns:
            # Perhaps it was the peer who had the core, and was quick.
            if finished(address) == value:
                return 1
            if times_displaced(getrusage) != displaced:
                return 2
        rounds += 1
        if rounds % _ROUNDS == 0:  # what came and went quickly is not to blame for a gap later on
            displaced = times_displaced(getrusage)
        if now - started > limit_ns:
            return 0
        before = now


def _make_watch_word(stamp: int) -> Callable[[int, int, int, int, int, int, int, int], int]:
    def watch_word(
        address: int, value: int, call: int, limit_ns: int, crowded_ns: int, clock: int, yield_: int, getrusage: int
    ) -> int:
        _ = stamp
        return look_for(address, value, call, limit_ns, crowded_ns, clock, yield_, getrusage)

    return watch_word


def _make_watch_descriptors(stamp: int) -> Callable[[int, int, int, int, int, int, int, int], int]:
    def watch_descriptors(
        pollfds: int, count: int, limit_ns: int, crowded_ns: int, clock: int, yield_: int, getrusage: int, poll: int
    ) -> int:
        _ = stamp
        displaced = times_displaced(getrusage)
        started = before = clock_ns(clock)
        rounds = 0
        while True:
            if _poll(poll, pollfds, count) != 0:
                return 1
            call_address(yield_)
            now = clock_ns(clock)
            if now - before > crowded_ns and times_displaced(getrusage) != displaced:
                return 2
            rounds += 1
            if rounds % _ROUNDS == 0:
                displaced = times_displaced(getrusage)
            if now - started > limit_ns:
                return 0
            before = now

    return watch_descriptors


class Watch:
    """The compiled loops; one for the whole process, see `watch`."""

    def __init__(self) -> None:
        self._clock, self._poll, self._getrusage, self._yield = (
            c_function(name) for name in ("clock_gettime", "poll", "getrusage", "sched_yield")
        )
        self._nobody_calls = ctypes.c_int64()
        self._call = ctypes.addressof(self._nobody_calls)
        stamp = source_stamp()
        self._kept = (
            compile_entry(_make_watch_word(stamp), types.int64, 8),
            compile_entry(_make_watch_descriptors(stamp), types.int64, 8),
        )
        word, descriptors = (entry.address for entry in self._kept)
        self._watch_word = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 8)(word)
        self._watch_descriptors = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 8)(descriptors)

    def word(self, address: int, value: int, limit_s: float, crowded_s: float) -> int:
        """Looks until the int64 at ``address`` is ``value``; what was written before it can be read then.

        Args:
            address: multiple of 8, of memory that stays mapped meanwhile.
            value: what to look for.
            limit_s: at most so long, in seconds.
            crowded_s: ends when another thread of this system had the core for so long between two looks.

        Returns:
            a `Seen`.
        """
        limit_ns, crowded_ns = int(limit_s * 1e9), int(crowded_s * 1e9)
        return self._watch_word(
            address, value, self._call, limit_ns, crowded_ns, self._clock, self._yield, self._getrusage
        )

    def descriptors(self, pollfds: int, count: int, limit_s: float, crowded_s: float) -> int:
        """As `word`, until something happens on one of ``count`` C ``struct pollfd`` at the address ``pollfds``."""
        limit_ns, crowded_ns = int(limit_s * 1e9), int(crowded_s * 1e9)
        return self._watch_descriptors(
            pollfds, count, limit_ns, crowded_ns, self._clock, self._yield, self._getrusage, self._poll
        )


@functools.cache
def watch() -> Watch:
    """The compiled loops of this process; the first call compiles them or loads them from the on-disk cache."""
    return Watch()
