"""What this machine offers, found without torch, which takes seconds to import: the package's C library, built when the
package is installed, if there is a compiler; features of the CPU; GPU drivers."""

from __future__ import annotations

import ctypes
import enum
import functools
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


class Features(enum.IntFlag):
    """CPU features; the values match ``kernels/cpu/common.h``."""

    AVX2 = 1
    AVX512 = 2
    BF16_DOT = 4
    """Multiplies pairs of bfloat16 into float32 (AVX512-BF16)."""
    INTEGER_DOT = 8
    """Multiplies four bytes each into 32 bits (AVX512-VNNI)."""
    MATRIX_UNIT = 16
    """Multiplies tiles of bfloat16 (AMX)."""
    BYTE_LOOKUP = 32
    """Looks up 64 bytes in a table of 128 (AVX512-VBMI)."""


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The loaded library, or None if it was not built or cannot be loaded here.

    Calls of its functions release the interpreter lock. Callers declare the argument types of the functions.
    """
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_native{suffix}")
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError:
                return None
    return None


@functools.cache
def cpu_features() -> Features:
    """The features of this CPU; empty without the library."""
    library = native_library()
    return Features(0 if library is None else library.moe_cpu_features())


def has_gpu_driver() -> bool:
    """Whether the system has the device files of NVIDIA's driver (also in WSL2) or of AMD's."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
