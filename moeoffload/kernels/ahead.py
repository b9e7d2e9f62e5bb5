"""Compiles all programs ahead of time, while an image is built, say: ``python -m moeoffload.kernels.ahead``.

Without it each process compiles what it lacks when it starts. The on-disk cache that is filled here belongs to this
installation and to CPUs like this one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import permutations, product
from multiprocessing import get_context
from time import monotonic
from typing import Any

from numba.core.caching import FunctionCache

from moeoffload.kernels.exchange_program import exchange_programs
from moeoffload.kernels.lane_program import lane_programs
from moeoffload.kernels.pack import convert_program, encode_program, pack_program, unpack_program
from moeoffload.kernels.program import COMPUTE_DTYPES, experts_program, linear_program
from moeoffload.kernels.turnaround_program import answer_program, lane_turnaround_program, turnaround_program
from moeoffload.kernels.watch import watch


def programs() -> Iterator[Callable[[], Any]]:
    """What compiles each program, or loads it; those that take longest first."""
    dtypes = sorted(COMPUTE_DTYPES, key=str)
    for make in (experts_program, linear_program):
        yield from (partial(make, dtype) for dtype in dtypes)
    yield from (answer_program, turnaround_program, lane_turnaround_program, exchange_programs, lane_programs, watch)
    yield from (partial(make, dtype) for make in (unpack_program, encode_program) for dtype in dtypes)
    yield from (partial(pack_program, *pair) for pair in product(dtypes, repeat=2))
    yield from (partial(convert_program, *pair) for pair in permutations(dtypes, 2))


def _compile(program: Callable[[], Any]) -> None:
    program()  # what it returns cannot leave the process


def main() -> None:
    """Compiles them in as many processes as there are cores."""
    begun = monotonic()
    try:
        folder = FunctionCache(_compile).cache_path
    except RuntimeError:
        raise SystemExit("error: no folder for compiled kernels can be written; set NUMBA_CACHE_DIR to one") from None
    say = partial(logging.basicConfig, level=logging.INFO, format="%(message)s")
    say()
    found = list(programs())
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn"), say) as pool:
        list(pool.map(_compile, found))
    logging.info("%d programs are in %s after %.0f s", len(found), folder, monotonic() - begun)


if __name__ == "__main__":
    main()
