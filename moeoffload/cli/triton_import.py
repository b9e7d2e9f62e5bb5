"""transformers and torch import Triton where they find it; without a GPU that is 130 MiB and a moment for nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def skip_triton_without_gpu() -> None:
    """Hides Triton from this process, before torch is imported, unless there is a GPU or its interpreter is wanted."""
    has_gpu = any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg"))  # the second in WSL2
    if not has_gpu and "TRITON_INTERPRET" not in os.environ:
        sys.modules["triton"] = None  # type: ignore[assignment]
