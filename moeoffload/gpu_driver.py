"""Detects GPU drivers without torch, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path


def has_gpu_driver() -> bool:
    """Whether the system has the device files of NVIDIA's driver (also in WSL2) or of AMD's."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
