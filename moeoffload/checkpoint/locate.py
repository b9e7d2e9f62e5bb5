"""Finds the folder of a model that is named by a path or by a hub id."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from moeoffload.checkpoint.model_config import CONFIG_FILE, first_line
from moeoffload.checkpoint.tensors import INDEX_FILE, SINGLE_FILE, read_json
from moeoffload.errors import ModelError

# Everything a host or an expert server reads; pickled weights and code are left on the hub.
_WANTED_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_UNWANTED_FILES = ["*/*", "consolidated*"]


def locate(model: str | Path, revision: str | None = None) -> Path:
    """The local folder of ``model``: a folder, or a hub id such as ``"org/name"`` (local cache first, then download).

    ``revision`` is a branch, tag or commit of the hub id. Raises ModelError with what was tried when there is no such
    model.
    """
    try:
        folder = Path(model).expanduser()
    except RuntimeError:  # ~ of nobody
        raise ModelError(f"{model}: no such folder") from None
    if folder.is_dir():
        return folder.resolve()
    if isinstance(model, Path) or folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"{model}: no such folder")
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise ModelError(f"{model!r}: no such folder, and not a hub id") from error
    return _from_cache(model, revision) or _from_hub(model, revision)


def locate_cached(model: str, revision: str | None = None) -> Path | None:
    """The folder of a hub id if all of it is in the local cache; nothing is downloaded, and no folder is looked at."""
    try:
        validate_repo_id(model)
        return _from_cache(model, revision)
    except (HFValidationError, ValueError, OSError, ModelError):  # revisions are checked by nobody else
        return None


def _from_cache(model: str, revision: str | None) -> Path | None:
    try:
        snapshot = snapshot_download(model, revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, FileNotFoundError):
        return None
    folder = Path(snapshot)
    # An earlier, interrupted or partial download leaves a snapshot without its weights: go on to the hub then.
    return folder if _is_complete(folder) else None


def _from_hub(model: str, revision: str | None) -> Path:
    try:
        snapshot = snapshot_download(
            model, revision=revision, allow_patterns=_WANTED_FILES, ignore_patterns=_UNWANTED_FILES
        )
    except Exception as error:  # connection, HTTP, disk and validation errors share no base class
        at = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"{model}{at}: no such folder, not complete in the local hub cache, and not to be had from the hub: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    return Path(snapshot)


def _is_complete(folder: Path) -> bool:
    if not (folder / CONFIG_FILE).is_file():
        return False
    if (folder / SINGLE_FILE).is_file():
        return True
    if not (folder / INDEX_FILE).is_file():
        return False
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        return False
    return all(isinstance(shard, str) and (folder / shard).is_file() for shard in weight_map.values())
