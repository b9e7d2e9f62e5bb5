"""Files that somebody made to do harm: each is refused in one line before anything of their size is made."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.model_config import config_of
from moeoffload.checkpoint.tensors import TensorIndex, read_json
from moeoffload.errors import ModelError, SettingError
from moeoffload.host.routing import read_routing_stats

from .test_open import edit_config

CHECKPOINT: Any = SimpleNamespace(digest="d" * 64, layers=[SimpleNamespace(n_experts=2)])
# What a header says of a tensor.
ENTRIES = (
    '{"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}',
    '{"dtype": "F32", "shape": [1], "data_offsets": [0, NaN]}',
    '{"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}',
    '{"dtype": "F32", "shape": ["1"], "data_offsets": ["0", "4"]}',
    '{"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}',
    f'{{"dtype": "Q4", "shape": [1], "data_offsets": [0, {2**70}]}}',
    f'{{"dtype": "F32", "shape": [{", ".join(["9" * 4000] * 100)}], "data_offsets": [0, 4]}}',
    f'{{"dtype": "F32", "shape": [{", ".join(["1"] * 1000)}], "data_offsets": [0, 4]}}',
    "[]",
    "7",
    "{}",
    '{"dtype": "F32", "shape": [2], "data_offsets": [0]}',
    '{"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}',
    '{"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}',
)


@pytest.mark.parametrize(
    "header",
    ["not json", "[]", "[" * 100_000, *(f'{{"a\\nERROR": {entry}}}' for entry in ENTRIES)],
    ids=lambda text: text[:60],
)
def test_a_header_that_is_no_object_or_has_numbers_that_are_none_is_refused(tmp_path: Path, header: str) -> None:
    data = header.encode()
    (tmp_path / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(4))
    with pytest.raises(ModelError, match="damaged") as caught:
        TensorIndex.open(tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("claimed", [2**63, 2**64 - 1, 10**9, 5])
def test_a_header_longer_than_its_file_is_not_read(tmp_path: Path, claimed: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(claimed.to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match="does not fit in 10 bytes"):
        TensorIndex.open(tmp_path)


@pytest.mark.parametrize("shard", [7, None, "../x.safetensors", "/etc/passwd", "x.bin", ["a"], ""])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, shard: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a\nb": shard}}))
    with pytest.raises(ModelError, match="no safetensors file here") as caught:
        TensorIndex.open(tmp_path)
    assert str(caught.value).isprintable()


def test_a_file_larger_than_any_of_its_kind_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as stream:
        stream.truncate(1 << 40)  # takes no room
    with pytest.raises(ModelError, match="more than 100000000 bytes"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts", "n_routed_experts", "num_attention_heads"])
@pytest.mark.parametrize("value", ["1000000000", "-1", "1e300", "9" * 400])
def test_a_config_with_an_absurd_number_of_modules_is_refused(tmp_path: Path, key: str, value: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "qwen3_moe", "{key}": {value}}}')
    values = read_json(tmp_path / "config.json")
    with pytest.raises(ModelError, match=f"{key} is .*, allowed are 0 to"):
        config_of(values, "config.json")


@pytest.mark.parametrize(
    "claim",
    [
        {"num_hidden_layers": 1000, "num_local_experts": 32_767},
        {"num_hidden_layers": 1000},
        {"num_hidden_layers": 30, "num_local_experts": 32_767},
    ],
    ids=str,
)
def test_a_config_that_claims_more_than_the_files_hold_is_refused_before_a_model_is_built(
    tiny: Path, claim: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeoffload.checkpoint.checkpoint.build_meta_model", lambda *_: pytest.fail("it was built"))
    edit_config(tiny, **claim)
    with pytest.raises(ModelError, match=r"config\.json claims .* but the files hold") as caught:
        Checkpoint.open(tiny)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "counts",
    ["[[1, NaN]]", "[[1, 1e999]]", "[[1, -1]]", '["12"]', "[[1, 1.5]]", "[[true, 1]]", "7", "[" * 100_000],
    ids=lambda text: text[:20],
)
def test_routing_statistics_that_are_none_are_refused(tmp_path: Path, counts: str) -> None:
    path = tmp_path / "stats.json"
    path.write_text(f'{{"version": 1, "model_digest": "{"d" * 64}", "tokens": 1, "counts": [[1, 2]]}}')
    assert read_routing_stats(path, CHECKPOINT) == [[1, 2]]
    path.write_text(f'{{"version": 1, "model_digest": "{"d" * 64}", "tokens": 1, "counts": {counts}}}')
    with pytest.raises(SettingError, match="routing-stats") as caught:
        read_routing_stats(path, CHECKPOINT)
    assert len(str(caught.value)) < 1000
    path.write_text('{"version": 1, "model_digest": "7", "tokens": 1, "counts": [[1, 2]]}')
    with pytest.raises(SettingError, match="another model"):
        read_routing_stats(path, CHECKPOINT)
