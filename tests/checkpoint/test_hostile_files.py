"""What cannot work, and files made to do harm: refused in one line before anything of their size is made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import edit_config
from synthetic import write_checkpoint, write_tiny
from transformers import CONFIG_MAPPING

from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.model_config import config_of
from moeoffload.checkpoint.tensors import TensorIndex, read_json
from moeoffload.errors import ModelError, SettingError
from moeoffload.host.routing import read_routing_stats

from .conftest import CPU, rewrite

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


EXPERT_3 = "model.layers.1.mlp.experts.3.gate_proj.weight"
STACKED = "model.layers.1.mlp.experts.gate_up_proj"
GATE_UP_1 = r"model\.layers\.1\.mlp\.experts\.gate_up_proj"


def assert_refused(folder: Path, pattern: str) -> None:
    with pytest.raises(ModelError, match=pattern) as caught:
        Checkpoint.open(folder)
    assert "\n" not in str(caught.value)


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (None, r"has no config\.json"),
        ("{not json", r"config\.json: is not valid JSON"),
        ("[1]", r"must hold a JSON object"),
        ("[" * 100_000, r"config\.json: is not valid JSON"),
        ("{}", r"model_type None is not known"),
        ('{"model_type": 7}', r"model_type 7 is not known"),
        ('{"model_type": "no_such_model"}', r"model_type 'no_such_model' is not known"),
        ('{"model_type": "qwen3_moe", "hidden_size": "wide"}', r"not a valid qwen3_moe config"),
        ('{"model_type": "bert"}', r"no text-generating model|not a Mixture-of-Experts"),
        ('{"model_type": "qwen3_moe", "configuration_files": 5}', r"config\.json: not valid"),
    ],
)
def test_config(content: str | None, pattern: str, tiny: Path) -> None:
    (tiny / "config.json").unlink()
    if content is not None:
        (tiny / "config.json").write_text(content)
    assert_refused(tiny, pattern)


QUANTISED_TEXT = r"qwen3_moe checkpoint is quantised in a way that is not supported \(%s"


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        ({"num_attention_heads": 0}, r"cannot build a qwen3_moe model|not a valid qwen3_moe config"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, QUANTISED_TEXT % "bitsandbytes"),
        ({"quantization_config": {"bits": 4}}, QUANTISED_TEXT % "unnamed"),
        ({"quantization_config": {"quant_method": ["fp8"]}}, QUANTISED_TEXT % r"\['fp8'\]"),
        ({"text_config": {"quantization_config": {"bits": 4}}}, r"not supported \(unnamed"),
        ({"vision_config": {"inner": {"depth": 3000}}}, r"claims 3000 layers"),
        ({"moe_intermediate_size": 16}, r"experts\.\w+_proj: the stored tensors give shape .*, the model needs"),
    ],
    ids=str,
)
def test_values_of_a_config(values: dict[str, Any], pattern: str, tiny: Path) -> None:
    edit_config(tiny, **values)
    assert_refused(tiny, pattern)


@pytest.mark.parametrize(
    ("model_type", "values", "pattern"),
    [
        ("llama", {"intermediate_size": 32}, r"llama: not a Mixture-of-Experts model"),
        ("qwen3_moe", {"mlp_only_layers": [0], "intermediate_size": 32}, r"qwen3_moe: not a Mixture-of-Experts model"),
        ("jetmoe", {"num_local_experts": 4}, r"jetmoe: its experts \(JetMoe\w+\) do not use transformers' experts"),
        ("llama4_text", {"num_local_experts": 2}, r"llama4_text: its experts \(Llama4TextExperts\) do not use"),
        ("longcat_flash", {"num_layers": 1}, r"longcat_flash: its experts \(LongcatFlash\w+\) do not use"),
    ],
)
def test_families_without_routed_experts_that_can_move(
    model_type: str, values: dict[str, Any], pattern: str, tiny: Path
) -> None:
    common = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    common |= {"num_key_value_heads": 2, "pad_token_id": 0}
    if model_type == "longcat_flash":
        common = {"vocab_size": 320}
    CONFIG_MAPPING[model_type](**(common | values)).save_pretrained(tiny)
    assert_refused(tiny, pattern)


def test_conversion_that_mixes_modules(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["ernie4_5_vl_moe"](
        text_config={
            "vocab_size": 320, "hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": [16, 16], "moe_num_experts": 4,
            "mlp_layer_types": ["dense", "sparse"], "pad_token_id": 0,
        },
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32},
    )  # fmt: skip
    write_checkpoint(config, tmp_path, dtype=torch.float32)
    assert_refused(tmp_path, r"stored together with .*not supported")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("weights.old", r"no weights; needed is model\.safetensors"),
        ("pytorch_model.bin", r"only pickled weights \(pytorch_model\.bin\), which are never opened"),
    ],
)
def test_weights_under_another_name(name: str, pattern: str, tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / name)
    assert_refused(tiny, pattern)


@pytest.mark.parametrize("known", [True, False])
def test_code_in_the_checkpoint_is_never_run(known: bool, tiny: Path) -> None:
    (tiny / "modeling_own.py").write_text(f"open({str(tiny / 'ran')!r}, 'w')\nclass C: pass\nclass M: pass\n")
    auto_map = {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    edit_config(tiny, auto_map=auto_map, **({} if known else {"model_type": "own"}))
    if known:
        Checkpoint.open(tiny).build_experts(0, [0], CPU)
    else:
        assert_refused(tiny, r"model_type 'own' is not known")
    assert not (tiny / "ran").exists()


@pytest.mark.parametrize("kept", [0, 5, 8, 100, -1, -4096])
def test_truncated_file(kept: int, tiny: Path) -> None:
    data = (tiny / "model.safetensors").read_bytes()
    (tiny / "model.safetensors").write_bytes(data[:kept])
    assert_refused(tiny, r"model\.safetensors: truncated or damaged")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_tiny("mixtral", tmp_path / "sharded", shard_bytes=200_000)


def point_at(weight_map: object) -> Callable[[Path], object]:
    """Makes the index promise this, with one file there."""

    def damage(folder: Path) -> None:
        first_shard(folder).rename(folder / "model-00001-of-00003.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        (
            lambda folder: first_shard(folder).unlink(),
            r"1 of \d+ files of model\.safetensors\.index\.json are missing: model-00001-of",
        ),
        (
            lambda folder: os.truncate(first_shard(folder), first_shard(folder).stat().st_size - 1),
            r"model-00001-of-\d+\.safetensors: truncated",
        ),
        (point_at({"more": "model-00001-of-00003.safetensors"}), r"has no tensor more, which .*index\.json promises"),
        (point_at({}), r"index\.json: has no weight_map"),
        (point_at([]), r"index\.json: has no weight_map"),
        (point_at(None), r"index\.json: has no weight_map"),
    ],
)
def test_shards_that_are_not_what_the_index_promises(
    damage: Callable[[Path], object], pattern: str, sharded: Path
) -> None:
    damage(sharded)
    assert_refused(sharded, pattern)


def test_files_that_shrink_or_go_after_they_were_opened(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    for shard in sharded.glob("*.safetensors"):
        shard.write_bytes(b"")
    with pytest.raises(ModelError, match=r"truncated: tensor .* ends early"):
        checkpoint.build_experts(0, [0], CPU)
    with pytest.raises(ModelError, match=r"truncated: tensor .* ends early"):
        _ = checkpoint.digest
    for shard in sharded.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(ModelError, match=r"cannot be opened"):
        checkpoint.build_experts(0, [0], CPU)


def up_proj(expert: int) -> str:
    return f"model.layers.1.mlp.experts.{expert}.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda all: all.pop(EXPERT_3), rf"{GATE_UP_1}: .* tensors like .*\.0\.gate_proj\.weight for 7 of 8 experts"),
        (lambda all: [all.pop(up_proj(n)) for n in range(8)], rf"{GATE_UP_1}: .* has no tensors like .*up_proj"),
        (
            lambda all: [all.pop(name) for name in list(all) if ".layers.1.mlp.experts" in name],
            r"model\.layers\.1\.mlp\.experts\.\w+_proj: the checkpoint has no tensors for it",
        ),
        (
            lambda all: all.update({EXPERT_3: torch.zeros(16, 64)}),
            rf"{GATE_UP_1}: {EXPERT_3} has shape \(16, 64\), .* has \(32, 64\)",
        ),
        (
            lambda all: all.update({up_proj(n): torch.zeros(32, 60) for n in range(8)}),
            rf"{GATE_UP_1}: its stored tensors do not fit",
        ),
        (lambda all: all.update({STACKED: torch.zeros(8, 64, 64)}), rf"{GATE_UP_1}: is stored twice"),
        (
            lambda all: all.update({EXPERT_3: all[EXPERT_3].to(torch.float8_e4m3fn)}),
            rf"{GATE_UP_1}: {EXPERT_3} is stored as F8_E4M3",
        ),
    ],
    ids=["expert", "projection", "layer", "one shape", "shapes that cannot be joined", "stored twice", "quantised"],
)
def test_tensors_that_are_missing_or_do_not_fit(
    change: Callable[[dict[str, torch.Tensor]], object], pattern: str, tiny: Path
) -> None:
    rewrite(tiny, change)
    assert_refused(tiny, pattern)


def test_other_number_of_experts(tmp_path: Path) -> None:
    write_tiny("gpt_oss", tmp_path, experts=8)
    edit_config(tmp_path, num_local_experts=6)
    assert_refused(tmp_path, r"experts\.\w+: .* has shape \(8, .*, its first dimension must be 6")
