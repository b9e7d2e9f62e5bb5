"""Model names: the path of a folder or file, or a hub id, at a revision.

This module does not import torch, so that commands refuse a wrong name at once. Hub ids and revisions may come from a
host on the network: `is_hub_id` and `check_revision` check their form and touch no file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from moeoffload.errors import ModelError
from moeoffload.text import one_line

_PART: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
_HUB_ID: Final = re.compile(rf"({_PART}/)?{_PART}")
_REVISION: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,199}")
GGUF_SUFFIX: Final = ".gguf"
WEIGHTS_SUFFIX: Final = ".safetensors"


def named_path(model: str | Path) -> Path | None:
    """The folder or file that ``model`` names; None if it is a hub id.
    Raises ModelError: it is neither, or the path is not a model."""
    try:
        path = Path(model).expanduser()
    except RuntimeError:  # ~ of a user that does not exist
        raise ModelError(f"{model}: no such folder") from None
    is_file_name = path.suffix in (GGUF_SUFFIX, WEIGHTS_SUFFIX)
    if path.is_dir() or (is_file_name and path.is_file()):
        return path
    if is_file_name:
        raise ModelError(f"{model}: no such file")
    if path.exists():
        raise ModelError(f"{model}: a model is a folder, a .gguf or a .safetensors file")
    if isinstance(model, Path) or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"{model}: no such folder")
    if not is_hub_id(model):
        raise ModelError(f"{model!r}: no such folder, and not a hub id")
    return None


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form ``name`` or ``org/name``."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def check_revision(revision: str | None) -> None:
    """Raises ModelError unless ``revision`` is None, or has the form of a branch, tag or commit."""
    if revision is None:
        return
    if not _REVISION.fullmatch(revision) or any(part in ("", ".", "..") for part in revision.split("/")):
        raise ModelError(f"revision {one_line(revision, 60)!r} is no name of a branch, tag or commit")
