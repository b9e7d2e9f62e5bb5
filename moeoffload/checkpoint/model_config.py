"""Reads a checkpoint's config.json and refuses invalid ones before a model is built from them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from moeoffload.checkpoint.tensors import TensorIndex, read_json
from moeoffload.errors import ModelError
from moeoffload.formats.file_format import FileFormat
from moeoffload.formats.methods import file_formats
from moeoffload.text import first_line, one_line

CONFIG_FILE = "config.json"
_COUNT = re.compile(r"(\w+_)?(num|n)_(\w*_)?(layers?|experts?|heads?|groups?)|(\w+_)?depth|(en|de)coder_layers")
_MAX_COUNT = 32_767
_CONFIG_BYTES = 4 << 20
MAX_CONFIG_TEXT = 1 << 18  # characters of a config that a host sends
_MAX_LAYERS = 1_000
_MAX_EXPERTS = 1 << 18  # all layers together
QUANTISATION_KEYS = ("quantization_config", "compression_config")
# Checkpoints whose own code repeats a class of transformers under another name.
_SAME_AS = {"kimi_k2": "deepseek_v3"}


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the values of config.json, with the model_type that transformers knows.

    Raises ModelError when it is missing or damaged.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(f"{folder}: has no {CONFIG_FILE}; needed is a folder in the transformers format")
    read_json(folder / CONFIG_FILE, _CONFIG_BYTES)  # refuses what is not JSON or not a file, in one line
    try:
        # Reads transformers' infinities, too.
        values, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    except Exception as error:  # of any type, for versions of the file that it may name
        raise ModelError(f"{folder / CONFIG_FILE}: not valid: {one_line(first_line(error), 200)}") from error
    same_as = _SAME_AS.get(str(values.get("model_type")))
    return values if same_as is None else values | {"model_type": same_as}


def config_of(values: dict[str, Any], where: str) -> Any:
    """Returns the transformers config of the values of a config.json; ``where`` names their origin in errors.

    It has no quantisation, so that the model is built with plain weights however they are stored. Code in a checkpoint
    is never run. Raises ModelError when the model_type is unknown, or its class does not accept the values.
    """
    _refuse_wrong(where, values)
    try:
        config = CONFIG_MAPPING[values["model_type"]].from_dict(without_keys(values, QUANTISATION_KEYS))
        config.get_text_config()  # raises for models with several generating parts
        return config
    except Exception as error:  # a config class may raise anything for an unexpected value
        reason = one_line(first_line(error), 200)
        raise ModelError(f"{where}: not a valid {values['model_type']} config: {reason}") from error


def parse_config(text: str) -> dict[str, Any]:
    """Returns the values of a config.json received as text. Raises ModelError when it is too long, not a JSON object,
    or has lists with numbers above `_MAX_COUNT`."""
    if len(text) > MAX_CONFIG_TEXT:
        raise ModelError(f"the host's config has more than {MAX_CONFIG_TEXT} characters")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError("the host's config is not valid JSON") from error
    if not isinstance(values, dict):
        raise ModelError("the host's config is no JSON object")
    for section in _sections(values):
        for key, value in section.items():
            # Some families build as many modules as the numbers of a list say.
            if isinstance(value, list) and "token" not in key and any(_is_many(each) for each in value):
                raise ModelError(f"the host's config: {one_line(key, 60)} has numbers above {_MAX_COUNT}")
    return values


def _is_many(value: object) -> bool:
    return not isinstance(value, str) and (not isinstance(value, int | float) or abs(value) > _MAX_COUNT)


def _refuse_wrong(where: str, raw: dict[str, Any]) -> None:
    """Raises ModelError for an unknown model_type or absurd counts: the model is built from these counts, and a damaged
    one must not fill the memory with modules."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        named = one_line(repr(model_type), 100)
        raise ModelError(f"{where}: model_type {named} is not known to the installed transformers")
    for section in _sections(raw):
        for key, value in section.items():
            if _is_count(key, value) and not 0 <= value <= _MAX_COUNT:
                raise ModelError(f"{where}: {key} is {str(value)[:20]}, allowed are 0 to {_MAX_COUNT}")


def refuse_empty_claims(config: Any, index: TensorIndex) -> None:
    """Refuses a config that claims far more layers or experts than the files hold, before anything is built from it.

    Each layer has at least one stored tensor; each expert of a layer has a tensor, or a row of one for all experts.
    Raises ModelError.
    """
    n_rows = sum(tensor.shape[0] if tensor.shape else 1 for tensor in index.values())
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


def _sections(config: dict[str, Any], depth: int = 3) -> Iterator[dict[str, Any]]:
    """Yields the config itself and its nested sections (text, vision, quantisation)."""
    yield config
    for value in config.values() if depth else ():
        if isinstance(value, dict):
            yield from _sections(value, depth - 1)


def _is_count(key: str, value: object, of: str = "") -> bool:
    if not isinstance(key, str) or not isinstance(value, int | float) or _COUNT.fullmatch(key) is None:
        return False
    return of in key or (of == "layer" and key.endswith("depth"))


def quantisation(values: dict[str, Any], where: Path) -> tuple[dict[str, Any], tuple[FileFormat, ...]]:
    """Returns the quantization_config of the config.json in ``where`` and the formats that tensors may have; both are
    empty if it has none. Raises ModelError when it is not supported."""
    for section in _sections(values):
        for key in QUANTISATION_KEYS:
            settings = section.get(key)
            if settings:
                try:
                    if not isinstance(settings, dict):
                        raise ValueError(str(settings)[:40])
                    return settings, file_formats(settings)
                except ValueError as error:
                    raise ModelError(
                        f"{where}: this {values.get('model_type')} checkpoint is quantised in a way that is "
                        f"not supported ({error}); bfloat16, float16 and float32 weights always are"
                    ) from error
    return {}, ()


def without_keys(value: Any, keys: Collection[str]) -> Any:
    """Returns a value of a config.json without some keys, at any depth."""
    if isinstance(value, dict):
        return {key: without_keys(each, keys) for key, each in value.items() if key not in keys}
    if isinstance(value, list):
        return [without_keys(each, keys) for each in value]
    return value
