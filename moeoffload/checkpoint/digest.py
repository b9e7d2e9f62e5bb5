"""Computes a fingerprint by which a host and its expert servers verify that they have the same model, and one by which
each of them notices that its files have changed.

The first covers what determines the results (config, names, dtypes, shapes) and samples the contents: reading every
byte of a large checkpoint takes minutes, and two different sets of weights practically never agree in sampled blocks of
every tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moeoffload.checkpoint.model_config import without_keys
from moeoffload.checkpoint.tensors import StoredTensor, TensorIndex, TensorReader

_BLOCK_BYTES = 4096
# Sampled are the first and last block of every tensor and, up to _MOST_BETWEEN, one more per this many bytes.
_SPACING_BYTES = 4 << 20
_MOST_BETWEEN = 6
# Several threads, because reads of 4 KiB are bound by disk latency.
_N_READERS = 8
_BATCH_TENSORS = 128
# Keys that change when a checkpoint is saved again or moved, without changing its results; the weights' dtype is in the
# tensor index.
_VOLATILE_KEYS = frozenset(
    {"transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "dtype", "torch_dtype"}
)


def digest_checkpoint(values: dict[str, Any], index: TensorIndex) -> str:
    """Returns the hex SHA-256 of config.json (``values``), the tensor index and blocks of 4 KiB of every tensor.

    Independent of the sharding.

    Raises ModelError when a file cannot be read.
    """
    digest = hashlib.sha256()
    config = without_keys(values, _VOLATILE_KEYS)
    digest.update(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
    tensors = list(index.values())
    batches = [tensors[start : start + _BATCH_TENSORS] for start in range(0, len(tensors), _BATCH_TENSORS)]
    with ThreadPoolExecutor(_N_READERS) as pool:
        for parts in pool.map(_digest_batch, batches):
            digest.update(parts)
    return digest.hexdigest()


def _digest_batch(tensors: list[StoredTensor]) -> bytes:
    with TensorReader() as reader:
        return b"".join(_digest_tensor(reader, tensor) for tensor in tensors)


def _digest_tensor(reader: TensorReader, tensor: StoredTensor) -> bytes:
    digest = hashlib.sha256(json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode())
    for start, size in _blocks(tensor.nbytes):
        digest.update(reader.read_bytes(tensor, start, size))
    return digest.digest()


def _blocks(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields start and size in bytes of a tensor's sampled blocks: within the tensor, and the same for every copy."""
    n_between = min(_MOST_BETWEEN, nbytes // _SPACING_BYTES)
    last = max(0, nbytes - _BLOCK_BYTES)
    for position in range(n_between + 2):
        start = last * position // (n_between + 1)
        if position == 0 or start > 0:
            yield start, min(_BLOCK_BYTES, nbytes - start)


def stamp_of(files: Iterable[Path]) -> str:
    """Returns a digest that changes when one of the files is written, replaced or removed.

    A write within the same clock tick of the file system may go unnoticed. All names (links) of a file give the same.
    """
    return hashlib.sha256(repr([_facts(file) for file in files]).encode()).hexdigest()


def _facts(file: Path) -> tuple[int, ...]:
    try:
        facts = file.stat()
    except OSError:
        return ()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
