"""Kernels use the threads of torch's own OpenMP runtime, since two pools would compete for the cores."""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from pathlib import Path
from typing import Final

import torch

logger = logging.getLogger(__name__)

# Waking another thread takes some microseconds, in which one core reads this many bytes.
_BYTES_PER_THREAD: Final = 1 << 18
_MAPS: Final = Path("/proc/self/maps")


def threads_for(n_bytes: int) -> int:
    """Returns the number of threads for reading ``n_bytes`` of weights, at most torch's number of threads."""
    n_threads = torch.get_num_threads()
    return 1 if n_threads == 1 else max(1, min(n_threads, n_bytes // _BYTES_PER_THREAD))


def openmp_runtime(maps: str) -> str | None:
    """Returns the path of the OpenMP runtime in the text of ``/proc/self/maps``, or None; it may contain spaces."""
    found = re.search(r"(/.*/lib(?:gomp|omp|iomp5)\b[^/\n]*\.so[^/\n]*)$", maps, re.MULTILINE)
    return None if found is None else found[1]


@functools.cache
def parallel_address() -> int:
    """Returns the address of ``GOMP_parallel`` in the OpenMP runtime that torch has loaded.

    0 if there is none: kernels then run in the calling thread, and one warning is logged.
    """
    reason = "torch has loaded no OpenMP runtime"
    try:
        path = openmp_runtime(_MAPS.read_text())
        if path is not None:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError) as error:
        reason = str(error)
    logger.warning("CPU kernels run on one thread, not on torch's %d: %s", torch.get_num_threads(), reason)
    return 0
