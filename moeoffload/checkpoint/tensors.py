"""Indexes the tensors of a folder of safetensors files and reads whole tensors or parts of them.

The format is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, byte range) and the data.
Files are read with ``pread`` instead of a memory map: mapped pages count as resident memory of a server, pages of the
kernel's file cache do not, and a short read is an error that can be reported. Only regular files are opened: a pipe or
device in a model's folder is neither waited for nor read.
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch

from moeoffload.errors import ModelError
from moeoffload.huge_pages import empty_weights
from moeoffload.text import one_line

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
COMPUTE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# The limit of the format; a header that claims more is damaged.
_MAX_HEADER_BYTES = 100_000_000
_MAX_JSON_BYTES = 100_000_000
_MAX_DIMENSIONS = 16
_MAX_NUMBER = 1 << 62
# One pread moves at most about 2 GiB on Linux; longer tensors take several.
_MAX_READ_BYTES = 1 << 30


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    ``offset`` and ``nbytes`` are in bytes in ``file``; ``dtype`` is the name used in the file (``"BF16"``).
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype. Raises ModelError if torch has none."""
        if self.dtype not in DTYPES:
            raise ModelError(f"{self.file.name}: tensor {self.name} has dtype {self.dtype}, which is not supported")
        return DTYPES[self.dtype]


class TensorIndex(dict[str, StoredTensor]):
    """Every tensor of a checkpoint by name, in name order."""

    def __init__(self, tensors: Iterable[StoredTensor]):
        super().__init__((tensor.name, tensor) for tensor in sorted(tensors, key=lambda tensor: tensor.name))

    @classmethod
    def open(cls, folder: Path) -> TensorIndex:
        """Reads the headers of all safetensors files of ``folder`` and check them against the file sizes.

        Raises ModelError when there are none, when a file of the index is missing, or when one is damaged or truncated.
        """
        if (folder / SINGLE_FILE).is_file():
            return cls(_read_header(folder / SINGLE_FILE))
        if (folder / INDEX_FILE).is_file():
            return cls(_read_shards(folder))
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only pickled weights ({pickled[0]}), which are never opened" if pickled else "no weights"
        raise ModelError(f"{folder}: {found}; needed is {SINGLE_FILE} or {INDEX_FILE} with its shards")

    def main_dtype(self) -> torch.dtype | None:
        """Returns the floating-point dtype of most bytes of the checkpoint, or None if it has none."""
        held: dict[torch.dtype, int] = {}
        for tensor in self.values():
            dtype = DTYPES.get(tensor.dtype)
            if dtype in COMPUTE_DTYPES:
                held[dtype] = held.get(dtype, 0) + tensor.nbytes
        return max(held, key=lambda dtype: held[dtype]) if held else None


class _Scratch(threading.local):
    """A thread's reused read buffers by role, and views of them by role, dtype and shape."""

    def __init__(self) -> None:
        self.rooms: dict[str, torch.Tensor] = {}
        self.views: dict[tuple[str, torch.dtype, tuple[int, ...]], tuple[torch.Tensor, memoryview]] = {}
        self.kept: dict[int, Any] = {}


class TensorReader:
    """Reads whole tensors or rows of them; keeps files open until the end of its ``with`` block. Thread-safe."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._opening = threading.Lock()
        self._scratch = _Scratch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    @property
    def kept(self) -> dict[int, Any]:
        """What callers keep for this thread's next reads."""
        return self._scratch.kept

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """Reads the whole tensor to new CPU memory in its stored dtype. Raises ModelError when bytes are missing."""
        result = empty_weights(tensor.shape, tensor.torch_dtype)
        self._read_into(tensor, 0, _bytes_of(result))
        return result

    def read_part(
        self, tensor: StoredTensor, role: str, row: int | None, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Reads the tensor or one row of it, to ``into`` or to a buffer that this thread's next read for ``role``
        reuses.

        The buffer is reused because allocating new memory would take longer than reading. ``into`` is contiguous uint8
        of the right size. Raises ModelError when bytes are missing.
        """
        shape = tensor.shape if row is None else tensor.shape[1:]
        n_bytes = tensor.nbytes if row is None else tensor.nbytes // tensor.shape[0]
        if into is not None:
            result = into.view(-1).view(tensor.torch_dtype).view(shape)
            buffer = _bytes_of(result)
        else:
            result, buffer = self._room(role, tensor.torch_dtype, shape, n_bytes)
        self._read_into(tensor, (row or 0) * n_bytes, buffer)
        return result

    def _room(
        self, role: str, dtype: torch.dtype, shape: tuple[int, ...], n_bytes: int
    ) -> tuple[torch.Tensor, memoryview]:
        """Returns this thread's buffer for ``role`` as a tensor of the dtype and shape, and its bytes. Views are
        cached: making one releases the interpreter lock, which takes longer to get back than reading a small tensor."""
        rooms, views = self._scratch.rooms, self._scratch.views
        room = rooms.get(role)
        if room is None or room.nbytes < n_bytes:
            room = rooms[role] = torch.empty(n_bytes, dtype=torch.uint8)
            for key in [key for key in views if key[0] == role]:
                del views[key]
        key = role, dtype, shape
        if key not in views:
            tensor = room[:n_bytes].view(dtype).view(shape)
            views[key] = tensor, _bytes_of(tensor)
        return views[key]

    def read_rows(self, tensor: StoredTensor, rows: Sequence[int]) -> torch.Tensor:
        """Reads ``tensor[rows]`` to CPU memory in its stored dtype, shape ``(len(rows), *tensor.shape[1:])``.

        Reads only the bytes of these rows. Raises ModelError when bytes are missing.
        """
        result = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.torch_dtype)
        row_bytes = tensor.nbytes // tensor.shape[0]
        for row, destination in zip(rows, result, strict=True):
            self._read_into(tensor, row * row_bytes, _bytes_of(destination))
        return result

    def read_bytes(self, tensor: StoredTensor, start: int, size: int) -> bytes:
        """Reads ``size`` bytes of the tensor from its byte ``start`` on. Raises ModelError when bytes are missing."""
        data = os.pread(self.descriptor(tensor.file), size, tensor.offset + start)
        if len(data) != size:
            raise _cut_short(tensor)
        return data

    def _read_into(self, tensor: StoredTensor, start: int, buffer: memoryview) -> None:
        descriptor = self.descriptor(tensor.file)
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done : done + _MAX_READ_BYTES]], tensor.offset + start + done)
            if count == 0:
                raise _cut_short(tensor)
            done += count

    def descriptor(self, file: Path) -> int:
        """Returns the descriptor of a file, which stays open. Raises ModelError when it cannot be opened."""
        with self._opening:
            if file not in self._descriptors:
                try:
                    self._descriptors[file] = open_regular(file)
                except OSError as error:
                    raise ModelError(f"{file}: cannot be opened: {error.strerror}") from error
            return self._descriptors[file]


def open_regular(path: Path) -> int:
    """Returns a descriptor of ``path`` for reading; the caller closes it.
    Raises ModelError: it is not a regular file; OSError: it cannot be opened."""
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"{path}: is no regular file")
    return descriptor


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Returns the contents of ``path``.
    Raises ModelError: it is not a regular file, or has more than ``most_bytes`` bytes; OSError: it cannot be read."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ModelError(f"{path}: has more than {most_bytes} bytes, which no file of its kind has")
    return data


def read_json(path: Path, most_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any]:
    """Returns the JSON object in ``path``. Raises ModelError when it cannot be read or is not an object."""
    try:
        value = json.loads(read_regular(path, most_bytes).decode("utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


def names_by_shard(folder: Path) -> dict[str, set[str]]:
    """Returns the names of the tensors in each file that the index of ``folder`` names; the files may be missing.
    Raises ModelError when the index is damaged or leads out of the folder."""
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX_FILE}: has no weight_map")
    wanted: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        # A shard must be in the folder of the index; any other path could lead out of it.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            where = f"{folder / INDEX_FILE}: tensor {one_line(name, 200)} is in {shard!r}"
            raise ModelError(f"{where}, which is no safetensors file here")
        wanted.setdefault(shard, set()).add(name)
    return wanted


def _read_shards(folder: Path) -> Iterator[StoredTensor]:
    wanted = names_by_shard(folder)
    missing = sorted(shard for shard in wanted if not (folder / shard).is_file())
    if missing:
        raise ModelError(f"{folder}: {len(missing)} of {len(wanted)} files of {INDEX_FILE} are missing: {missing[0]}")
    for shard in sorted(wanted):
        stored = {tensor.name: tensor for tensor in _read_header(folder / shard)}
        lost = sorted(wanted[shard] - stored.keys())
        if lost:
            raise ModelError(f"{folder / shard}: has no tensor {lost[0]}, which {INDEX_FILE} promises")
        yield from (stored[name] for name in wanted[shard])


def _read_header(file: Path) -> list[StoredTensor]:
    try:
        with os.fdopen(open_regular(file), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            header_bytes = int.from_bytes(stream.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{file}: truncated or damaged: its header does not fit in {size} bytes")
            header = json.loads(stream.read(header_bytes))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: damaged: its header is not valid JSON") from error
    try:
        start = 8 + header_bytes
        tensors = [_parse_entry(file, start, name, entry) for name, entry in header.items() if name != "__metadata__"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{file}: damaged: its header is not a safetensors header") from error
    end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=start)
    if size != end:
        raise ModelError(f"{file}: truncated or damaged: its header promises {end} bytes, the file has {size}")
    return tensors


def _parse_entry(file: Path, start: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    first, last = (_number(position) for position in entry["data_offsets"])
    if len(entry["shape"]) > _MAX_DIMENSIONS:
        raise ModelError(f"{file}: damaged: tensor {one_line(name, 200)} has {len(entry['shape'])} dimensions")
    shape = tuple(_number(length) for length in entry["shape"])
    tensor = StoredTensor(name, file, str(entry["dtype"]), shape, start + first, last - first)
    dtype = DTYPES.get(tensor.dtype)
    # The length of a dtype that torch lacks (4-bit packings) cannot be checked; reading such a tensor raises.
    expected = math.prod(shape) * dtype.itemsize if dtype is not None else tensor.nbytes
    if tensor.nbytes < 0 or tensor.nbytes != expected:
        what = f"tensor {one_line(name, 200)} of {expected} bytes"
        raise ModelError(f"{file}: damaged: {what} has the byte range {first}..{last}")
    return tensor


def _number(value: Any) -> int:
    """Returns a length or position of a header. Raises ValueError for what else JSON allows: text, fractions,
    infinities, integers of any size."""
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise ValueError(value)
    return value


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor."""
    return memoryview(cast(Any, tensor.flatten().view(torch.uint8).numpy()))


def _cut_short(tensor: StoredTensor) -> ModelError:
    return ModelError(f"{tensor.file}: truncated: tensor {tensor.name} ends early")
