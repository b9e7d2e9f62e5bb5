"""Semaphores for compiled code: the address of what posix_ipc has opened by name."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.sem_open.argtypes, library.sem_open.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    library.sem_close.argtypes = [ctypes.c_void_p]
    return library


class NativeSemaphore:
    """An open semaphore. It must be opened before its name is taken away, and closed once."""

    def __init__(self, name: str) -> None:
        """Opens the semaphore with this name.

        Raises:
            OSError: there is none.
        """
        address = _library().sem_open(name.encode(), 0)
        if not address:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), name)
        self.address = int(address)

    def close(self) -> None:
        """Gives it back; compiled code must not use the address any more."""
        _library().sem_close(self.address)
