"""Maps a checkpoint's ``quantization_config`` to the file formats of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from moeoffload.formats import awq, compressed, fp8, gptq, mxfp4
from moeoffload.formats.file_format import FileFormat

_METHODS: Final = {
    "fp8": fp8.FILE_FORMATS,
    "mxfp8": fp8.FILE_FORMATS,
    "mxfp4": mxfp4.FILE_FORMATS,
    "compressed-tensors": compressed.FILE_FORMATS,
    "gptq": gptq.FILE_FORMATS,
    "awq": awq.FILE_FORMATS,
}
_CHECKS: Final[dict[str, Callable[[Mapping[str, Any]], None]]] = {
    "compressed-tensors": compressed.check,
    "gptq": gptq.check,
    "awq": awq.check,
}


def file_formats(settings: Mapping[str, Any]) -> tuple[FileFormat, ...]:
    """Returns the formats that tensors of a checkpoint with these settings may have.

    Raises ValueError, in one line, for an unknown method or for settings of it that are not supported.
    """
    method = str(settings.get("quant_method", "unnamed method"))
    if method not in _METHODS:
        raise ValueError(f"{method[:40]}; known are {', '.join(sorted(_METHODS))}")
    if method in _CHECKS:
        _CHECKS[method](settings)
    return _METHODS[method]
