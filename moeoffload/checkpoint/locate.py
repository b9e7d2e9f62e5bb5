"""Finds the folder of a model named by a path or a hub id."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache

from moeoffload.checkpoint.gguf_file import is_gguf
from moeoffload.checkpoint.model_config import CONFIG_FILE
from moeoffload.checkpoint.tensors import INDEX_FILE, SINGLE_FILE, names_by_shard
from moeoffload.errors import ModelError
from moeoffload.model_name import check_hub_id, check_revision, is_hub_id, named_path
from moeoffload.text import first_line

# Files that a host or an expert server reads; pickled weights and code are not downloaded.
_WANTED_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_UNWANTED_FILES = ["*/*", "consolidated*"]


def locate(model: str | Path, revision: str | None = None) -> Path:
    """Returns the local folder of ``model``: a folder, or a hub id such as ``"org/name"`` (local cache, then download).

    A file that ends in ``.gguf`` is itself a model and returned as an absolute path; one that ends in ``.safetensors``
    stands for its folder.

    ``revision`` is a branch, tag or commit of the hub id. Raises ModelError, saying what was tried, when there is no
    such model.
    """
    check_revision(revision)
    path = named_path(model)
    if path is not None and path.is_dir():
        return path.resolve()
    if path is not None:  # links to a GGUF file are not resolved: in a hub cache the target has no usable name
        return path.absolute() if is_gguf(path) else path.parent.resolve()
    model = str(model)
    found = _from_cache(model, revision)
    if found is None:
        check_hub_id(model, revision)
        found = _from_hub(model, revision)
    return found


def locate_cached(model: str, revision: str | None = None) -> Path | None:
    """Returns the folder of a hub id if it is complete in the local cache, else None; downloads nothing and looks at no
    other folder. Raises ModelError: ``revision`` is not a valid name."""
    check_revision(revision)
    if not is_hub_id(model):
        return None
    try:
        folder = _from_cache(model, revision)
        cache = Path(constants.HF_HUB_CACHE).resolve()
        return folder if folder is not None and folder.resolve().is_relative_to(cache) else None
    except (OSError, ModelError):
        return None


def _from_cache(model: str, revision: str | None) -> Path | None:
    """Returns the cached snapshot of a hub id at a revision, both already checked; None unless it is complete."""
    try:
        config = try_to_load_from_cache(model, CONFIG_FILE, revision=revision)
    except (OSError, ValueError):
        return None
    # An interrupted or partial download leaves a snapshot without weights: then the caller goes on to the hub.
    return Path(config).parent if isinstance(config, str) and _is_complete(Path(config).parent) else None


def _from_hub(model: str, revision: str | None) -> Path:
    try:
        snapshot = snapshot_download(
            model, revision=revision, allow_patterns=_WANTED_FILES, ignore_patterns=_UNWANTED_FILES
        )
    except Exception as error:  # connection, HTTP, disk and validation errors share no base class
        at = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"{model}{at}: no such folder, not complete in the local hub cache, and not to be had from the hub: "
            f"{first_line(error)}"
        ) from error
    return Path(snapshot)


def _is_complete(folder: Path) -> bool:
    if (folder / SINGLE_FILE).is_file():
        return True
    return (folder / INDEX_FILE).is_file() and all((folder / shard).is_file() for shard in names_by_shard(folder))
