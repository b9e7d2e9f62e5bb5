"""What makes torch and transformers quick to import: thousands of modules, most of a command's time to its start."""

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

from moeoffload.gpu_driver import has_gpu_driver

_TORCH_LIBRARIES: Final = (
    ("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL),  # as torch loads it first
    ("libtorch_cpu.so", os.RTLD_NOW),
)


def skip_triton_without_gpu() -> None:
    """Hides Triton from this process, before torch is imported, unless there is a GPU or its interpreter is wanted.

    torch and transformers import it where they find it; without a GPU that is 130 MiB and a moment for nothing.
    """
    if not has_gpu_driver() and "TRITON_INTERPRET" not in os.environ:
        sys.modules["triton"] = None  # type: ignore[assignment]


@contextmanager
def quick_imports() -> Iterator[None]:
    """While open, imports are not interrupted by Python's garbage collector, which would look at all objects again and
    again and find none to free; what was made by then it never looks at again, nor at the end of the process."""
    skip_triton_without_gpu()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_transformers() -> None:
    """Imports transformers and torch. Both take seconds; a part of both is done at the same time: transformers reads
    through the files of all its models, which is Python, while the system's loader brings torch's library into memory.
    """
    library = threading.Thread(target=load_torch_library, name="torch-library", daemon=True)
    import transformers

    # Not earlier: modules in C, which the first import needs, would wait for the loader.
    library.start()
    import transformers.models  # noqa: F401

    library.join()
    import torch  # noqa: F401


def load_torch_library() -> None:
    """Loads what ``import torch`` loads, without Python's lock, as far as that is possible; errors are left to it."""
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return
    folder = Path(torch.submodule_search_locations[0]) / "lib"
    dlopen = ctypes.CDLL(None).dlopen  # ctypes.CDLL(path) would hold Python's lock
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, mode in _TORCH_LIBRARIES:
        if not (folder / name).is_file() or not dlopen(os.fsencode(folder / name), mode):
            return
