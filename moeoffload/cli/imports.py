"""What makes torch and transformers quick to import: thousands of modules, most of a command's time to its start."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from moeoffload.gpu_driver import has_gpu_driver


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
