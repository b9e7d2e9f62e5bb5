"""Threads of the OpenMP runtime that torch has loaded, for the C kernels: another pool's would fight for cores."""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from pathlib import Path
from typing import Final

import torch

logger = logging.getLogger(__name__)

# Waking another thread costs some microseconds, in which one core reads this much.
_BYTES_PER_THREAD: Final = 1 << 18


def threads_for(n_bytes: int) -> int:
    """Threads for reading this many bytes of weights, keys or values: up to torch's number of threads."""
    n_threads = torch.get_num_threads()
    return 1 if n_threads == 1 else max(1, min(n_threads, n_bytes // _BYTES_PER_THREAD))


@functools.cache
def parallel_address() -> int:
    """Address of torch's ``GOMP_parallel``, by which C starts its threads; 0, and a warning, if there is none."""
    try:
        path = openmp_runtime(Path("/proc/self/maps").read_text())
        if path is not None:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value or 0
        problem = "no OpenMP runtime is loaded"
    except (OSError, AttributeError) as error:
        problem = str(error)
    logger.warning("CPU kernels use one thread: %s", problem)
    return 0


def openmp_runtime(maps: str) -> str | None:
    """Path of the OpenMP runtime among mappings as ``/proc/self/maps`` has them; it may have spaces in it."""
    found = re.search(r"(/.*/lib(?:gomp|omp|iomp5)\b[^/\n]*\.so[^/\n]*)$", maps, re.MULTILINE)
    return None if found is None else found[1]
