"""Files: headers of safetensors, their index, headers of GGUF, routing statistics."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moeoffload.checkpoint.gguf_config import config_values
from moeoffload.checkpoint.gguf_file import GgufFile
from moeoffload.checkpoint.tensors import INDEX_FILE, SINGLE_FILE, TensorIndex, TensorReader
from moeoffload.errors import ModelError, SettingError
from moeoffload.host.routing import read_routing_stats

_SHARD = "model-00001-of-00001.safetensors"
_HEADER = {"__metadata__": {"format": "pt"}, "a": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 16]}}
_DIGEST = "d" * 64
_CHECKPOINT: Any = SimpleNamespace(digest=_DIGEST, layers=[SimpleNamespace(n_experts=3)] * 2)


def _safetensors(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(16)


def _read(folder: Path) -> None:
    index = TensorIndex.open(folder)
    with TensorReader() as reader:
        for tensor in index.values():
            if tensor.nbytes > 1 << 20:
                raise AssertionError("a tensor that is larger than its file")
            if tensor.dtype in ("F32", "BF16", "I64"):
                reader.read(tensor)
                if tensor.shape and tensor.shape[0]:
                    reader.read_rows(tensor, [0, tensor.shape[0] - 1])
    index.main_dtype()


def _gguf_text(value: str) -> bytes:
    return len(value).to_bytes(8, "little") + value.encode()


def _gguf() -> bytes:
    """A header with every key of a config, an array and a tensor."""
    keys = ["block_count", "context_length", "embedding_length", "feed_forward_length", "expert_count"]
    keys += ["expert_used_count", "expert_feed_forward_length", "attention.head_count", "attention.head_count_kv"]
    values = [_gguf_text(f"qwen3moe.{key}") + struct.pack("<II", 4, 2) for key in keys]
    for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base"):
        values.append(_gguf_text(f"qwen3moe.{key}") + struct.pack("<If", 6, 1e-6))
    values.append(_gguf_text("general.architecture") + struct.pack("<I", 8) + _gguf_text("qwen3moe"))
    values.append(_gguf_text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 1) + _gguf_text("a"))
    tensor = _gguf_text("token_embd.weight") + struct.pack("<IQQIQ", 2, 32, 2, 8, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, len(values)) + b"".join(values) + tensor + bytes(128)


def _read_gguf(path: Path) -> None:
    found = GgufFile.open(path)
    size = path.stat().st_size
    if any(tensor.offset + tensor.nbytes > size for tensor in found.tensors):
        raise AssertionError("a tensor that is larger than its file")
    config_values(found)


def make() -> Callable[[bytes], None]:
    """The function to be fuzzed."""
    root = Path(tempfile.mkdtemp(prefix="moeoffload-fuzz-"))
    single, sharded, stats, gguf = root / "single", root / "sharded", root / "stats.json", root / "m.gguf"
    single.mkdir()
    sharded.mkdir()
    (sharded / _SHARD).write_bytes(_safetensors(json.dumps(_HEADER).encode()))

    def one_input(data: bytes) -> None:
        kind, rest = (data[0] if data else 0) % 5, data[1:]
        try:
            if kind == 0:
                (single / SINGLE_FILE).write_bytes(rest)
                _read(single)
            elif kind == 1:  # with a length that fits
                (single / SINGLE_FILE).write_bytes(_safetensors(rest))
                _read(single)
            elif kind == 2:
                (sharded / INDEX_FILE).write_bytes(rest)
                _read(sharded)
            elif kind == 4:
                gguf.write_bytes(rest)
                _read_gguf(gguf)
            else:
                stats.write_bytes(rest)
                read_routing_stats(stats, _CHECKPOINT)
        except (ModelError, SettingError):
            pass

    return one_input


def seeds() -> dict[str, bytes]:
    """Inputs made of real files."""
    header = json.dumps(_HEADER).encode()
    index = json.dumps({"metadata": {"total_size": 16}, "weight_map": {"a": _SHARD}}).encode()
    stats = json.dumps({"version": 1, "model_digest": _DIGEST, "tokens": 2, "counts": [[1, 0, 1]] * 2}).encode()
    return {
        "file": b"\0" + _safetensors(header),
        "header": b"\1" + header,
        "index": b"\2" + index,
        "stats": b"\3" + stats,
        "gguf": b"\4" + _gguf(),
    }
