"""Reads the header of a GGUF file: the model's metadata and the places of its tensors.

Source: docs/gguf.md of ggml. All numbers are little-endian; text is an 8-byte length and UTF-8; dimensions are stored
fastest first. Files are untrusted: every length is checked against the rest of the file before anything of that size is
allocated, and any mismatch is a ModelError.
"""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Final

from moeoffload.checkpoint.tensors import StoredTensor, open_regular
from moeoffload.errors import ModelError
from moeoffload.model_name import GGUF_SUFFIX
from moeoffload.text import one_line

_PART_NAME: Final = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_HEADER_BYTES: Final = 128 << 20  # vocabularies of 300,000 tokens take 10 MiB
_MAX_ENTRIES: Final = 1 << 16
_MAX_KEPT_NUMBERS: Final = 1 << 16
_MAX_DIMENSIONS: Final = 4
_MAX_ALIGNMENT: Final = 1 << 16
_MAX_PARTS: Final = 1_000
_TEXT, _ARRAY = 8, 9
_NUMBERS: Final = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


@dataclass(frozen=True)
class GgufFile:
    """The headers of a model's files.

    Attributes:
        files: the parts of the model, in order; usually one.
        metadata: values by key. Of arrays of texts, and of very long arrays of numbers, only the length is kept.
        tensors: tensors of all parts; ``dtype`` is ggml's type name, ``shape`` counts weights, in torch's order.
    """

    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: tuple[StoredTensor, ...]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Reads the header of ``path`` and of the other parts of its model.

        Raises ModelError when a part is missing, damaged, truncated, or has contents that no model has.
        """
        files = _parts(path)
        read = [_read_header(file) for file in files]
        for number, (file, (metadata, _)) in enumerate(zip(files, read, strict=True)):
            count = metadata.get("split.count", 1) or 1
            if (metadata.get("split.no", 0), count) != (number, len(files)):
                raise ModelError(
                    f"{file}: says that it is part {_shown(metadata.get('split.no', 0))} (from 0) of {_shown(count)}, "
                    f"its name says part {number} of {len(files)}; parts are named ...-00001-of-00003{GGUF_SUFFIX}"
                )
        tensors = tuple(tensor for _, found in read for tensor in found)
        metadata = read[0][0]
        promised = metadata.get("split.tensors.count", len(tensors))
        if promised != len(tensors) and len(files) > 1:
            raise ModelError(f"{files[0]}: promises {_shown(promised)} tensors, its parts hold {len(tensors)}")
        names = {tensor.name for tensor in tensors}
        if len(names) < len(tensors):
            raise ModelError(f"{files[0]}: damaged: a tensor is there twice")
        return cls(files, metadata, tensors)

    @property
    def architecture(self) -> str:
        """The name of the family in llama.cpp (``"qwen3moe"``)."""
        return one_line(str(self.metadata["general.architecture"]), 60)


def is_gguf(path: Path) -> bool:
    """Whether ``path`` names a GGUF file (it need not exist)."""
    return path.suffix == GGUF_SUFFIX


def _parts(path: Path) -> tuple[Path, ...]:
    """Returns all files of the model to which ``path`` belongs."""
    name = _PART_NAME.fullmatch(path.name)
    if name is None:
        return (path,)
    count = int(name["count"])
    if not 1 <= count <= _MAX_PARTS:
        raise ModelError(f"{path}: is one of {count} parts, supported are 1 to {_MAX_PARTS}")
    files = [path.with_name(f"{name['stem']}-{number:05}-of-{count:05}{GGUF_SUFFIX}") for number in range(1, count + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{path}: {len(missing)} of its {count} parts are missing: {missing[0]}")
    return tuple(files)


def _read_header(file: Path) -> tuple[dict[str, Any], list[StoredTensor]]:
    try:
        with os.fdopen(open_regular(file), "rb") as stream:
            return _Header(file, stream).read()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"{file}: damaged: its header is not one of GGUF ({one_line(str(error), 100)})") from error


class _Header:
    """Reads one file's header sequentially. Raises ModelError where it ends early, ValueError where it is invalid."""

    def __init__(self, file: Path, stream: IO[bytes]) -> None:
        self._file = file
        self._stream = stream
        self._size = os.fstat(stream.fileno()).st_size
        self._left = min(self._size, _MAX_HEADER_BYTES)

    def read(self) -> tuple[dict[str, Any], list[StoredTensor]]:
        """Returns the metadata and the tensors; checks that each tensor lies within the file."""
        if self._take(4) != _MAGIC:
            raise ModelError(f"{self._file}: is no GGUF file")
        version, n_tensors, n_values = self._unpack("<IQQ")
        if version not in _VERSIONS:
            raise ModelError(f"{self._file}: is of GGUF version {version}, supported are 2 and 3 (little-endian)")
        if max(n_tensors, n_values) > _MAX_ENTRIES:
            raise ModelError(f"{self._file}: damaged: claims {n_tensors} tensors and {n_values} values")
        metadata: dict[str, Any] = {}
        for _ in range(n_values):
            key = self._text()
            metadata[key] = self._value(self._unpack("<I")[0])
        if not isinstance(metadata.get("general.architecture", "" if metadata.get("split.no") else None), str):
            raise ModelError(f"{self._file}: damaged: does not say of what architecture it is")
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"alignment {_shown(alignment)}")
        entries = [self._entry() for _ in range(n_tensors)]
        start = -(-self._stream.tell() // alignment) * alignment
        return metadata, [self._tensor(start, *entry) for entry in entries]

    def _take(self, n_bytes: int) -> bytes:
        if n_bytes > self._left:
            raise ModelError(f"{self._file}: truncated or damaged: its header does not fit in {self._size} bytes")
        data = self._stream.read(n_bytes)
        if len(data) != n_bytes:
            raise ModelError(f"{self._file}: truncated: it became shorter while it was read")
        self._left -= n_bytes
        return data

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _text(self) -> str:
        return self._take(self._unpack("<Q")[0]).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._unpack(f"<{_NUMBERS[kind]}")[0]
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"a value of type {kind}")
        of, count = self._unpack("<IQ")
        if of == _TEXT:
            for _ in range(count):
                self._take(self._unpack("<Q")[0])
            return count
        if of not in _NUMBERS:
            raise ValueError(f"an array of type {of}")
        form = f"<{_NUMBERS[of]}"
        data = self._take(count * struct.calcsize(form))
        return [number for (number,) in struct.iter_unpack(form, data)] if count <= _MAX_KEPT_NUMBERS else count

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Returns name, shape, type and offset of the next tensor."""
        name = self._text()
        (n_dimensions,) = self._unpack("<I")
        if n_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {n_dimensions} dimensions")
        dimensions = self._unpack(f"<{n_dimensions}Q")
        if 0 in dimensions:
            raise ValueError("a tensor with a dimension of 0")
        kind, offset = self._unpack("<IQ")
        return name, dimensions[::-1], kind, offset

    def _tensor(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
        known = type_sizes().get(kind)
        if known is None:
            raise ModelError(f"{self._file}: tensor {one_line(name, 200)} is of type {kind}, which is not known")
        type_name, n_weights, n_bytes = known
        n_blocks, rest = divmod(math.prod(shape), n_weights)
        if rest or (shape[-1] if shape else 1) % n_weights:
            raise ValueError(f"rows of {shape[-1] if shape else 1} weights in blocks of {n_weights}")
        if start + offset + n_blocks * n_bytes > self._size:
            raise ModelError(
                f"{self._file}: truncated or damaged: tensor {one_line(name, 200)} ends at byte "
                f"{_shown(start + offset + n_blocks * n_bytes)}, the file has {self._size}"
            )
        return StoredTensor(name, self._file, type_name, shape, start + offset, n_blocks * n_bytes)


@cache
def type_sizes() -> dict[int, tuple[str, int, int]]:
    """Maps the number of each type of ggml to its name, weights per block and bytes per block."""
    from gguf.constants import GGML_QUANT_SIZES

    return {kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


def _shown(value: object) -> str:
    return one_line(str(value), 30)
