"""The package's C library, made when the package is installed; None where there was no compiler."""

from __future__ import annotations

import ctypes
import functools
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The loaded library, or None if it was not built or cannot be loaded here.

    Calls of its functions release the interpreter lock. Whoever calls one declares its arguments.
    """
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_native{suffix}")
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError:
                return None
    return None
