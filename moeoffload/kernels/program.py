"""Compiling with numba, for the programs that are not in C yet: the on-disk cache, threads.

An entry is a C function of one address, that of a call block of int64 words. Python fills the words and calls; nothing
is boxed or checked on the way, and the same function is what every thread of torch's own pool runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
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

from moeoffload.kernels.calls import COMPUTE_DTYPES, may_use_matrix_unit
from moeoffload.kernels.threads import parallel_address, threads_for
from moeoffload.kernels.vector_ir import has_bf16_dot

__all__ = ["COMPUTE_DTYPES", "Program", "compile_entry", "threads_for"]

logger = logging.getLogger(__name__)


# compute dtype -> numba element type of weights (see vector_ir)
WEIGHT_TYPES: Final = {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}


@functools.cache
def row_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the products read rows: bfloat16 where the CPU multiplies it, else float32."""
    return dtype if dtype == torch.bfloat16 and has_bf16_dot() else torch.float32


ITEM_GROUPS: Final = 16
"""Groups of four weight rows that a thread claims at a time."""
ALL_GROUPS: Final = 1 << 30
"""A single thread claims all of a phase at once."""


class Program:
    """A compiled entry. ``run`` releases the interpreter lock."""

    def __init__(self, make_entry: Callable[..., Callable[[int], None]], dtype: torch.dtype) -> None:
        entry = make_entry(WEIGHT_TYPES[dtype], WEIGHT_TYPES[row_dtype(dtype)], source_stamp())
        self._compiled = compile_entry(entry)
        self.address = self._compiled.address
        self.run: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
        """Runs the phases of the call block at an address in this thread."""
        self._team = parallel_address()

    def run_threaded(self, block: int, n_threads: int) -> None:
        """Runs them in ``n_threads`` threads of torch's own pool; without one, in this thread."""
        if self._team == 0:
            self.run(block)
        else:
            _PARALLEL(self._team)(self.address, block, n_threads, 0)


_PARALLEL: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


@functools.cache
def c_function(name: str) -> int:
    """Address of a function of the C library."""
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0


def functions_of_a_look() -> list[Any]:
    """Addresses of what compiled code on shared memory calls: CLOCK, YIELD, GETRUSAGE, TRY_WAIT, POST of its block."""
    names = ("clock_gettime", "sched_yield", "getrusage", "sem_trywait", "sem_post")
    return [c_function(name) for name in names]


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
    "attention_blocks.py",
    "attention_blocks_program.py",
    "attention_program.py",
    "attention_rows.py",
    "attention_steps.py",
    "attention_words.py",
    "norm_program.py",
    "packed_tile.py",
    "phases.py",
    "program.py",
    "tile.py",
    "value_tile.py",
    "vector_ir.py",
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
