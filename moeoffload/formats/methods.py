"""Maps a checkpoint's ``quantization_config`` to the file formats of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moeoffload.formats import awq, compressed, fp8, gptq, mxfp4
from moeoffload.formats.file_format import FileFormat

_METHODS: Final = {
    "fp8": fp8,
    "mxfp8": fp8,
    "mxfp4": mxfp4,
    "compressed-tensors": compressed,
    "gptq": gptq,
    "awq": awq,
}
_WITH_SETTINGS: Final = (compressed, gptq, awq)


def file_formats(settings: Mapping[str, Any]) -> tuple[FileFormat, ...]:
    """Returns the formats that tensors of a checkpoint with these settings may have.

    Raises ValueError, in one line, for an unknown method or for settings of it that are not supported.
    """
    method = str(settings.get("quant_method", "unnamed method"))
    if method not in _METHODS:
        raise ValueError(f"{method[:40]}; known are {', '.join(sorted(_METHODS))}")
    module = _METHODS[method]
    if module in _WITH_SETTINGS:
        module.check(settings)
    formats: tuple[FileFormat, ...] = module.FILE_FORMATS
    return formats
