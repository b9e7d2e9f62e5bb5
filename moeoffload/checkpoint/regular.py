"""Opens a model's files, regular files only: a pipe or device in its folder is neither waited for nor read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from moeoffload.errors import ModelError


def open_regular(path: Path) -> int:
    """Returns a descriptor of ``path`` for reading; the caller closes it.
    Raises ModelError: it is not a regular file; OSError: it cannot be opened."""
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"{path}: is no regular file")
    return descriptor


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Returns the contents of ``path``.
    Raises ModelError: it is not a regular file, or has more than ``most_bytes`` bytes; OSError: it cannot be read."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ModelError(f"{path}: has more than {most_bytes} bytes, which no file of its kind has")
    return data
