"""Model names: the path of a folder or file, or a hub id, at a revision, which the hub has or not.

This module does not import torch, so that commands refuse a wrong name at once; `checkpoint.locate` downloads models.
Hub ids and revisions may come from a host on the network: `is_hub_id` and `check_revision` check their form and touch
no file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from moeoffload.errors import ModelError
from moeoffload.last_resort import answer_within
from moeoffload.text import first_line, one_line

_PART: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
_HUB_ID: Final = re.compile(rf"({_PART}/)?{_PART}")
_REVISION: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,199}")
GGUF_SUFFIX: Final = ".gguf"
WEIGHTS_SUFFIX: Final = ".safetensors"
HUB_S: Final = 2.5
"""How long the hub may take to answer, unless HF_HUB_ETAG_TIMEOUT, huggingface_hub's own setting, says otherwise."""
_SLACK_S: Final = 0.25


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


def check_hub_id(model: str, revision: str | None) -> None:
    """Asks the hub once whether it has ``model`` at ``revision``, unless its config is in the local cache.
    Raises ModelError: the hub does not have it, or does not answer in time."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import (
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        if isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            return
    except (OSError, ValueError):
        pass  # the hub reports what is wrong
    wait_s = constants.HF_HUB_ETAG_TIMEOUT if os.environ.get("HF_HUB_ETAG_TIMEOUT") else HUB_S
    at = f" at revision {revision}" if revision else ""
    missing = f"{model}{at}: no such folder, not in the local hub cache, and"
    try:
        answer_within(wait_s + _SLACK_S, "hub", lambda: HfApi().model_info(model, revision=revision, timeout=wait_s))
    except Exception as error:  # connection, HTTP and validation errors share no base class
        match error:
            case OfflineModeIsEnabled():
                reason = "the hub is not asked: HF_HUB_OFFLINE is set"
            case RevisionNotFoundError():
                reason = "the hub has no such revision of it"
            case RepositoryNotFoundError():  # unknown, private or gated: the hub does not say which
                reason = f"the hub has none of that name, or wants a token for it: {one_line(first_line(error))}"
            case HfHubHTTPError():
                reason = f"the hub refuses: {one_line(first_line(error))}"
            case _ if "timeout" in type(error).__name__.lower():
                reason = f"the hub cannot be reached within {wait_s:g} s (HF_HUB_ETAG_TIMEOUT=SECONDS waits longer)"
            case _:
                reason = f"the hub cannot be reached: {one_line(first_line(error))}"
        raise ModelError(f"{missing} {reason}") from error


def short_name(model: str | Path) -> str:
    """Returns how clients call a model by default: the name of its folder or GGUF file, or its hub id."""
    path = Path(model).expanduser()
    if path.suffix == WEIGHTS_SUFFIX:
        path = path.parent
    return path.resolve().name if path.exists() else str(model)
