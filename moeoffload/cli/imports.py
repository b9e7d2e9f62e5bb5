"""Faster imports of torch and transformers: thousands of modules, and most of a command's startup time."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from moeoffload.native import has_gpu_driver

_TORCH_LIBRARIES: Final = (
    ("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL),  # torch loads it first, too
    ("libtorch_cpu.so", os.RTLD_NOW),
)


def skip_triton_without_gpu() -> None:
    """Hides Triton from this process, before torch is imported, unless there is a GPU or its interpreter is requested.

    torch and transformers import it if it is installed; without a GPU that wastes 130 MiB and some time.
    """
    if not has_gpu_driver() and "TRITON_INTERPRET" not in os.environ:
        sys.modules["triton"] = None  # type: ignore[assignment]


@contextmanager
def quick_imports() -> Iterator[None]:
    """While open, Python's garbage collector is off: it would scan all imported objects repeatedly and free none.
    Objects that exist at the end are frozen, so that it never scans them, not even when the process ends."""
    skip_triton_without_gpu()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_transformers() -> None:
    """Imports transformers and torch, which take seconds each, partly in parallel: transformers scans the files of all
    its models in Python while the system's loader maps torch's library without the interpreter lock.
    """
    library = threading.Thread(target=load_torch_library, name="torch-library", daemon=True)
    import transformers

    # Not earlier: the first import needs C modules, which would wait for the loader.
    library.start()
    import transformers.models

    library.join()
    import torch  # noqa: F401

    if not has_gpu_driver() and "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.logging.set_verbosity_error()  # its warnings would advise to install kernels for GPUs


def load_torch_library() -> None:
    """Loads the libraries of ``import torch`` without the interpreter lock, if possible; the import reports errors."""
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return
    folder = Path(torch.submodule_search_locations[0]) / "lib"
    dlopen = ctypes.CDLL(None).dlopen  # ctypes.CDLL(path) would hold the interpreter lock
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, mode in _TORCH_LIBRARIES:
        if not (folder / name).is_file() or not dlopen(os.fsencode(folder / name), mode):
            return
