"""Headers of GGUF files: what the gguf package writes is read as its own reader reads it; anything else is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from moeoffload.checkpoint.gguf_file import GgufFile
from moeoffload.errors import ModelError


def write(path: Path, *, part_tensors: int = 0) -> Path:
    """A file with every kind of value and a few types of tensors."""
    writer = gguf.GGUFWriter(path, "qwen3moe", split_max_tensors=part_tensors)
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_string("general.name", "größer")
    writer.add_bool("a.flag", True)
    writer.add_int64("a.number", -5)
    writer.add_array("a.list", [1, 2, 3])
    writer.add_token_list(["a", "bc", ""])
    writer.add_tensor("x", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("blk.0.y", np.zeros((4, 5, 34 * 2), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("z", np.zeros((3, 144), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(path: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        GgufFile.open(path)
    assert str(caught.value).isprintable()


def test_a_header_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    found, reference = GgufFile.open(path), gguf.GGUFReader(path)
    assert found.metadata == {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": 2,
        "qwen3moe.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "general.name": "größer",
        "a.flag": True,
        "a.number": -5,
        "a.list": [1, 2, 3],
        "tokenizer.ggml.tokens": 3,
    }
    assert [(t.name, t.dtype, t.shape, t.offset, t.nbytes) for t in found.tensors] == [
        (t.name, t.tensor_type.name, tuple(int(n) for n in t.shape[::-1]), t.data_offset, t.n_bytes)
        for t in reference.tensors
    ]


def test_a_model_of_several_parts_is_found_by_any_of_them(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", part_tensors=1)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        found = GgufFile.open(part)
        assert found.files == tuple(parts)
        assert [(tensor.name, tensor.file) for tensor in found.tensors] == list(
            zip(("x", "blk.0.y", "z"), parts, strict=True)
        )
        assert found.architecture == "qwen3moe"


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", part_tensors=1)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    refused(tmp_path / "m-00001-of-00003.gguf", r"1 of its 3 parts are missing: m-00002-of-00003\.gguf")


def test_parts_of_other_models_and_under_other_names_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", part_tensors=1)
    first = tmp_path / "m-00001-of-00003.gguf"
    (tmp_path / "other.gguf").write_bytes(first.read_bytes())
    refused(tmp_path / "other.gguf", r"part 0 \(from 0\) of 3, its name says part 0 of 1")
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(first.read_bytes())
    refused(first, r"part 0 \(from 0\) of 3, its name says part 1 of 3")
    huge = tmp_path / "m-00001-of-99999.gguf"
    huge.write_bytes(first.read_bytes())
    refused(huge, "99999 parts")


def header(*entries: bytes, n_tensors: int = 0, n_values: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_values) + b"".join(entries)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, dimensions: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("qwen3moe")
LONG = (1 << 63) + 5


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "does not fit in 0 bytes"),
        (b"GGML" + bytes(100), "no GGUF file"),
        (b"GGUF", "does not fit in 4 bytes"),
        (header(version=1), "version 1"),
        (header(version=0x03000000), "version 50331648"),
        (header(), "architecture"),
        (header(n_tensors=LONG), "claims"),
        (header(n_values=LONG), "claims"),
        (header(n_values=1), "does not fit"),
        (header(struct.pack("<Q", LONG), n_values=1), "does not fit"),
        (header(struct.pack("<Q", 2) + b"\xff\xfe" + bytes(8), n_values=1), "damaged"),
        (header(text("a") + struct.pack("<I", 99), n_values=1), "value of type 99"),
        (header(text("a") + struct.pack("<IIQ", 9, 4, LONG), n_values=1), "does not fit"),
        (header(text("a") + struct.pack("<IIQ", 9, 8, LONG), n_values=1), "does not fit"),
        (header(text("a") + struct.pack("<IIQ", 9, 9, 1), n_values=1), "array of type 9"),
        (header(text("general.architecture") + struct.pack("<IB", 0, 7), n_values=1), "architecture"),
        (header(ARCHITECTURE, text("general.alignment") + struct.pack("<II", 4, 0), n_values=2), "alignment 0"),
        (header(ARCHITECTURE, text("general.alignment") + struct.pack("<II", 4, 48), n_values=2), "alignment 48"),
        (header(ARCHITECTURE, tensor("a\nERROR", [4]), n_values=1, n_tensors=1), "tensor a ERROR ends at"),
        (header(ARCHITECTURE, tensor("a", [LONG] * 4), n_values=1, n_tensors=1), "ends at byte"),
        (header(ARCHITECTURE, tensor("a", [1] * 5), n_values=1, n_tensors=1), "5 dimensions"),
        (header(ARCHITECTURE, tensor("a", [1], offset=LONG), n_values=1, n_tensors=1), "ends at byte"),
        (header(ARCHITECTURE, tensor("a", [32], kind=99), n_values=1, n_tensors=1), "type 99, which is not known"),
        (header(ARCHITECTURE, tensor("a", [33, 32], kind=8), n_values=1, n_tensors=1), "33 weights in blocks of 32"),
        (header(ARCHITECTURE, tensor("a", [0]), n_values=1, n_tensors=1), "dimension of 0"),
        (header(ARCHITECTURE, tensor("a", [1]), tensor("a", [1]), bytes(64), n_values=1, n_tensors=2), "there twice"),
    ],
)
def test_what_no_header_says_is_refused_in_one_line(tmp_path: Path, data: bytes, match: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    refused(path, match)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    end = max(tensor.offset + tensor.nbytes for tensor in GgufFile.open(path).tensors)
    data, cut = path.read_bytes(), tmp_path / "cut.gguf"
    for size in range(0, end, 7):
        cut.write_bytes(data[:size])
        refused(cut, "")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "m.gguf")
    refused(tmp_path / "m.gguf", "no regular file")
