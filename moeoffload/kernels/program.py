"""The compiled experts program: its call block, its two entries, compiling, the on-disk cache, threads.

An entry is a C function of one address, that of a call block of int64 words. Python fills the words and calls; nothing
is boxed or checked on the way, and the same function is what every thread of torch's own pool runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Final

import numba
import numpy as np
import torch
from numba import types
from numba.core.registry import cpu_target

from moeoffload.kernels import words
from moeoffload.kernels.matrix_phases import pack_rows, project_as_fits
from moeoffload.kernels.matrix_tile import may_use_matrix_unit
from moeoffload.kernels.phases import (
    convert,
    make_plan,
    plan_one,
    plan_words,
    silu_times_up,
    view,
    wait_for_items,
    weighted_sum,
)
from moeoffload.kernels.vector_ir import has_bf16_dot

logger = logging.getLogger(__name__)


def _make_experts_entry(weight_type: Any, row_type: Any, stamp: int) -> Callable[[int], None]:
    def experts_entry(address: int) -> None:
        # Closure values are part of numba's cache key, other files' contents are not.
        _ = stamp
        call = view(address, np.int64, words.CALL_WORDS)
        layer = view(call[words.LAYER], np.int64, words.LAYER_WORDS)
        n_experts, hidden, inter = (layer[words.N_EXPERTS], layer[words.HIDDEN], layer[words.INTER])
        up_columns = layer[words.UP_COLUMNS]
        n_rows, top_k, phases = (call[words.N_ROWS], call[words.TOP_K], call[words.PHASES])
        n_routes = n_rows * top_k
        counters = address + np.int64(words.COUNTERS * 8)
        item_groups, limit = call[words.ITEM_GROUPS], call[words.LIMIT]
        yield_address, packed = call[words.YIELD], call[words.PACKED]
        plan = view(call[words.PLAN], np.int32, plan_words(n_experts, n_routes))
        operands = view(call[words.OPERANDS], row_type, n_rows * hidden)
        up = view(call[words.UP], weight_type, n_routes * up_columns)
        activated = view(call[words.ACTIVATED], row_type, n_routes * inter)
        down = view(call[words.DOWN], weight_type, n_routes * hidden)

        if phases & words.PLAN_PHASE:
            for counter in range(words.N_COUNTERS):
                call[words.COUNTERS + counter * words.COUNTER_WORDS] = 0
                call[words.COUNTERS + counter * words.COUNTER_WORDS + 1] = 0
            call[words.BAD_ROUTE] = make_plan(view(call[words.SLOTS], np.int64, n_routes), top_k, n_experts, plan)
            if call[words.BAD_ROUTE] >= 0:
                return
            if call[words.OPERANDS] != call[words.ROWS]:
                convert(view(call[words.ROWS], weight_type, n_rows * hidden), operands)
        n_items = 0
        pack_up, pack_down = counters + words.PACK_UP * 64, counters + words.PACK_DOWN * 64
        if phases & words.PACK_UP_PHASE:
            pack_rows(packed, plan, n_experts, n_routes, hidden, operands, False, pack_up, limit)
        if phases & words.UP_PHASE:
            weights = view(layer[words.UP_WEIGHT], weight_type, n_experts * up_columns * hidden)
            bias = view(layer[words.UP_BIAS], weight_type, n_experts * up_columns)
            mode = 2 if layer[words.UP_BIAS] != 0 else 0
            n_items = project_as_fits(
                packed,
                pack_up,
                yield_address,
                plan,
                n_experts,
                n_routes,
                weights,
                up_columns,
                hidden,
                operands,
                False,
                bias,
                mode,
                up,
                item_groups,
                counters,
                limit,
            )
        if phases & words.ACTIVATE_PHASE:
            wait_for_items(counters, n_items, yield_address)
            n_items = silu_times_up(plan, inter, up, activated, counters + 64, limit)
        if phases & words.PROJECT_DOWN:
            wait_for_items(counters + 64, n_items, yield_address)
        if phases & words.PACK_DOWN_PHASE:
            pack_rows(packed, plan, n_experts, n_routes, inter, activated, True, pack_down, limit)
        if phases & words.DOWN_PHASE:
            weights = view(layer[words.DOWN_WEIGHT], weight_type, n_experts * hidden * inter)
            bias = view(layer[words.DOWN_BIAS], weight_type, n_experts * hidden)
            mode = 2 if layer[words.DOWN_BIAS] != 0 else 0
            n_items = project_as_fits(
                packed,
                pack_down,
                yield_address,
                plan,
                n_experts,
                n_routes,
                weights,
                hidden,
                inter,
                activated,
                True,
                bias,
                mode,
                down,
                item_groups,
                counters + 128,
                limit,
            )
        if phases & words.SUM_PHASE:
            wait_for_items(counters + 128, n_items, yield_address)
            out = view(call[words.OUT], np.float32, n_rows * hidden)
            if call[words.WEIGHTS_ARE_F32]:
                route_weights = view(call[words.WEIGHTS], np.float32, n_routes)
                weighted_sum(
                    plan, n_experts, n_rows, top_k, hidden, down, route_weights, False, out, counters + 192, limit
                )
            else:
                rounded = view(call[words.WEIGHTS], weight_type, n_routes)
                weighted_sum(plan, n_experts, n_rows, top_k, hidden, down, rounded, True, out, counters + 192, limit)

    return experts_entry


def _make_linear_entry(weight_type: Any, row_type: Any, stamp: int) -> Callable[[int], None]:
    def linear_entry(address: int) -> None:
        _ = stamp
        call = view(address, np.int64, words.CALL_WORDS)
        n_rows, n_in, n_out = call[words.N_ROWS], call[words.N_IN], call[words.N_OUT]
        plan = view(call[words.PLAN], np.int32, plan_words(1, n_rows))
        operands = view(call[words.OPERANDS], row_type, n_rows * n_in)
        if call[words.PHASES] & words.PLAN_PHASE:
            for number in (0, words.PACK_UP):
                call[words.COUNTERS + number * words.COUNTER_WORDS] = 0
                call[words.COUNTERS + number * words.COUNTER_WORDS + 1] = 0
            plan_one(plan, n_rows)
            if call[words.OPERANDS] != call[words.ROWS]:
                convert(view(call[words.ROWS], weight_type, n_rows * n_in), operands)
        if call[words.PHASES] & words.UP_PHASE:
            weights = view(call[words.WEIGHT], weight_type, n_out * n_in)
            bias = view(call[words.BIAS], weight_type, n_out)
            mode = 1 if call[words.BIAS] != 0 else 0
            out = view(call[words.OUT], weight_type, n_rows * n_out)
            counter = address + np.int64(words.COUNTERS * 8)
            groups, packing = call[words.ITEM_GROUPS], counter + words.PACK_UP * 64
            pack_rows(call[words.PACKED], plan, 1, n_rows, n_in, operands, True, packing, words.NO_LIMIT)
            project_as_fits(
                call[words.PACKED],
                packing,
                call[words.YIELD],
                plan,
                1,
                n_rows,
                weights,
                n_out,
                n_in,
                operands,
                True,
                bias,
                mode,
                out,
                groups,
                counter,
                words.NO_LIMIT,
            )

    return linear_entry


# compute dtype -> numba element type of weights (see vector_ir)
WEIGHT_TYPES: Final = {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}
COMPUTE_DTYPES: Final = frozenset(WEIGHT_TYPES)


@functools.cache
def row_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the products read rows: bfloat16 where the CPU multiplies it, else float32."""
    return dtype if dtype == torch.bfloat16 and has_bf16_dot() else torch.float32


ITEM_GROUPS: Final = 16
"""Groups of four weight rows that a thread claims at a time."""
ALL_GROUPS: Final = 1 << 30
"""A single thread claims all of a phase at once."""

# Waking another thread costs some microseconds, in which one core reads this much.
_BYTES_PER_THREAD: Final = 1 << 18


def threads_for(n_bytes: int) -> int:
    """Threads for reading this many bytes of weights: up to torch's number of threads."""
    n_threads = torch.get_num_threads()
    return 1 if n_threads == 1 else max(1, min(n_threads, n_bytes // _BYTES_PER_THREAD))


class Program:
    """A compiled entry. ``run`` releases the interpreter lock."""

    def __init__(self, make_entry: Callable[..., Callable[[int], None]], dtype: torch.dtype) -> None:
        entry = make_entry(WEIGHT_TYPES[dtype], WEIGHT_TYPES[row_dtype(dtype)], source_stamp())
        self._compiled = compile_entry(entry)
        self.address = self._compiled.address
        self.run: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
        """Runs the phases of the call block at an address in this thread."""
        self._team = _team()

    @property
    def team_address(self) -> int:
        """Of the C function that runs an entry in several threads, 0 if there is none."""
        return 0 if self._team is None else self._team.address

    def run_threaded(self, block: int, n_threads: int) -> None:
        """Runs them in ``n_threads`` threads of torch's own pool; without one, in this thread."""
        if self._team is None:
            self.run(block)
        else:
            self._team.parallel(self.address, block, n_threads, 0)


class _Team:
    """The OpenMP runtime that torch has loaded."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.parallel: Any = library.GOMP_parallel
        self.parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self.parallel.restype = None
        self.address: int = ctypes.cast(self.parallel, ctypes.c_void_p).value or 0


def openmp_runtime(maps: str) -> str | None:
    """Path of the OpenMP runtime among mappings as ``/proc/self/maps`` has them; it may have spaces in it."""
    found = re.search(r"(/.*/lib(?:gomp|omp|iomp5)\b[^/\n]*\.so[^/\n]*)$", maps, re.MULTILINE)
    return None if found is None else found[1]


@functools.cache
def _team() -> _Team | None:
    """Threads that wait in another pool would fight with torch's for cores, so this shares torch's."""
    try:
        path = openmp_runtime(Path("/proc/self/maps").read_text())
        if path is not None:
            return _Team(ctypes.CDLL(path))
    except (OSError, AttributeError) as error:
        logger.info("kernels use one thread: %s", error)
    return None


@functools.cache
def c_function(name: str) -> int:
    """Address of a function of the C library."""
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0


def functions_of_a_look() -> list[Any]:
    """Addresses of what compiled code on shared memory calls: CLOCK, YIELD, GETRUSAGE, TRY_WAIT, POST of its block."""
    names = ("clock_gettime", "sched_yield", "getrusage", "sem_trywait", "sem_post")
    return [c_function(name) for name in names]


@functools.cache
def experts_program(dtype: torch.dtype) -> Program:
    """The experts program for a compute dtype; compiled, or loaded from the on-disk cache, when first asked for."""
    return Program(_make_experts_entry, dtype)


@functools.cache
def linear_program(dtype: torch.dtype) -> Program:
    """The program of a linear layer for a dtype."""
    return Program(_make_linear_entry, dtype)


def compile_entry(entry: Callable[..., Any], returns: Any = types.void, n_arguments: int = 1) -> Any:
    """Compiles a function of int64 arguments to a C function, or loads it from the on-disk cache.

    The machine code stays until the process ends: callers keep one for each variant, not one for each object.
    """
    signature = returns(*[types.int64] * n_arguments)
    entry.__qualname__ += f".{_digest(entry)}"
    begun = monotonic()
    with _say_if_slow():
        try:
            compiled = numba.cfunc(signature, nopython=True, cache=True)(entry)
        except (RuntimeError, OSError) as error:
            # numba found no folder for its cache that can be written, or it is full.
            logger.warning("compiled kernels are not kept on disk, each start compiles them again: %s", error)
            return numba.cfunc(signature, nopython=True)(entry)
    if not compiled.cache_hits:
        logger.info("compiled %s in %.1f s", entry.__name__, monotonic() - begun)
    return compiled


def _digest(entry: Callable[..., Any]) -> str:
    """Of all that the machine code of an entry depends on: a name, by which numba calls the files of its cache.

    Several programs in one index would not be safe: numba writes the index before the code, so another process, or the
    next one if this one is killed in between, could find there what an older program has left under the same number.
    """
    values = [getattr(cell.cell_contents, "__name__", cell.cell_contents) for cell in entry.__closure__ or ()]
    cpu = cpu_target.target_context.codegen().magic_tuple()
    return hashlib.sha256(repr((numba.__version__, cpu, values)).encode()).hexdigest()[:16]


_SLOW_S: Final = 5.0


@functools.cache
def _say_slow() -> None:
    logger.warning("compiling kernels for this CPU, for up to a minute or two")


@contextmanager
def _say_if_slow() -> Iterator[None]:
    """The first start on a machine computes nothing meanwhile; once, whoever waits is told why."""
    timer = threading.Timer(_SLOW_S, _say_slow)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_SOURCES: Final = (
    "exchange_program.py",
    "exchange_words.py",
    "frame_program.py",
    "lane_program.py",
    "lane_words.py",
    "matrix_phases.py",
    "matrix_tile.py",
    "pack.py",
    "phases.py",
    "program.py",
    "tile.py",
    "turnaround_program.py",
    "turnaround_words.py",
    "vector_ir.py",
    "watch.py",
    "words.py",
)


@functools.cache
def source_stamp() -> int:
    """Changes with any file the compiled code is made from, and with the CPU's units; numba looks at one file only."""
    folder = Path(__file__).parent
    digest = hashlib.sha256(bytes([may_use_matrix_unit()]))
    for name in _SOURCES:
        digest.update((folder / name).read_bytes())
    return int.from_bytes(digest.digest()[:7], "little")
