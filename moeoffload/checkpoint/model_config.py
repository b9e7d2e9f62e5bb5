"""Reads a checkpoint's config.json and refuses at once what cannot work, before anything is built from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from moeoffload.checkpoint.tensors import TensorIndex, read_json
from moeoffload.errors import ModelError
from moeoffload.formats.methods import file_formats

CONFIG_FILE = "config.json"
_COUNT = re.compile(r"(\w+_)?(num|n)_(\w*_)?(layers?|experts?|heads?|groups?)")
_MAX_COUNT = 32_767
_CONFIG_BYTES = 4 << 20
_MAX_LAYERS = 1_000
_MAX_EXPERTS = 1 << 18  # of all layers together
_QUANTISATION_KEYS = ("quantization_config", "compression_config")


def read_config(folder: Path) -> Any:
    """The transformers config object of ``folder``, that of plain weights; code in a checkpoint is never run.

    Raises ModelError when config.json is missing, damaged or of an unknown model_type.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(f"{folder}: has no {CONFIG_FILE}; needed is a folder in the transformers format")
    raw = read_json(folder / CONFIG_FILE, _CONFIG_BYTES)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"{folder / CONFIG_FILE}: model_type {model_type!r} is not known to the installed transformers"
        )
    _refuse_absurd(folder, raw)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a config class may raise anything over a value that it does not expect
        raise ModelError(f"{folder / CONFIG_FILE}: not a valid {model_type} config: {first_line(error)}") from error
    return _without_quantisation(config)


def refuse_empty_claims(config: Any, index: TensorIndex) -> None:
    """Refuse a config that claims far more layers or experts than the files hold, before anything is built from it.

    A layer owns a stored tensor at least; an expert of a layer owns a tensor, or a row of one that holds all experts.
    Raises ModelError.
    """
    n_rows = sum(tensor.shape[0] if tensor.shape else 1 for tensor in index)
    for section in _sections(config.to_dict()):
        layers, experts = (
            max((value for key, value in section.items() if _is_count(key, value, of)), default=0)
            for of in ("layer", "expert")
        )
        if layers > min(len(index), _MAX_LAYERS):
            limit = f"the files hold {len(index)} tensors, and {_MAX_LAYERS} layers are the most that is supported"
            raise ModelError(f"{config.model_type}: config.json claims {layers} layers, but {limit}")
        if layers * experts > min(n_rows, _MAX_EXPERTS):
            limit = (
                f"the files hold {n_rows} rows of weights, and {_MAX_EXPERTS} experts are the most that is supported"
            )
            raise ModelError(
                f"{config.model_type}: config.json claims {experts} experts in {layers} layers, but {limit}"
            )


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its class name when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _sections(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config itself, and those of its parts (text, vision, quantisation)."""
    yield config
    yield from (value for value in config.values() if isinstance(value, dict))


def _is_count(key: str, value: object, of: str = "") -> bool:
    return isinstance(value, int | float) and of in key and _COUNT.fullmatch(key) is not None


def _refuse_absurd(folder: Path, raw: dict[str, Any]) -> None:
    """The model is built from these numbers, without weights; a damaged one must not fill the memory with modules."""
    for section in _sections(raw):
        for key, value in section.items():
            if _is_count(key, value) and not 0 <= value <= _MAX_COUNT:
                raise ModelError(f"{folder / CONFIG_FILE}: {key} is {str(value)[:20]}, allowed are 0 to {_MAX_COUNT}")


def quantisation(folder: Path) -> dict[str, Any] | None:
    """The quantization_config of config.json; None when it has none.

    Raises ModelError when it is none that can be read.
    """
    raw = read_json(folder / CONFIG_FILE, _CONFIG_BYTES)
    for section in _sections(raw):
        for key in _QUANTISATION_KEYS:
            settings = section.get(key)
            if settings:
                try:
                    if not isinstance(settings, dict):
                        raise ValueError(str(settings)[:40])
                    file_formats(settings)
                except ValueError as error:
                    raise ModelError(
                        f"{folder}: this {raw.get('model_type')} checkpoint is quantised in a way that is "
                        f"not supported ({error}); bfloat16, float16 and float32 weights always are"
                    ) from error
                return settings
    return None


def _without_quantisation(config: Any) -> Any:
    """The config of the same model with plain weights: so it is built, whatever its weights are stored in."""
    for section in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for key in _QUANTISATION_KEYS:
            if getattr(section, key, None) is not None:
                delattr(section, key)
    return config
