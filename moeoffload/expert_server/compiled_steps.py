"""What is left of compiled decode steps until the request path without them: nothing is answered by compiled code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any


class CompiledSteps:
    """Never made."""

    block: Any
    address: int

    def answer(self, request: int, n_bytes: int, reply: int, queue_s: float) -> int:
        """Answers no frame."""
        del request, n_bytes, reply, queue_s
        return 0


def word_table(values: Sequence[int]) -> Any:
    """The values as int64 words."""
    return (ctypes.c_int64 * len(values))(*values)
