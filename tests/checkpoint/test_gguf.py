"""Models in GGUF files: experts as packed rows, dense tensors, config and tokenizer, compared with their libraries'."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf_models as models
import pytest
import torch
from models import edit_config
from synthetic import write_tiny
from synthetic.gguf_file import write_gguf as write_for_llama_cpp
from transformers import AutoTokenizer

from moeoffload.checkpoint import Checkpoint
from moeoffload.errors import ModelError
from moeoffload.formats import PackedWeights
from moeoffload.formats.gguf import BLOCK_TYPES
from moeoffload.host.model import load_dense_model, load_tokenizer

from .conftest import CPU, assert_read_alone

PACKED = [("qwen3_moe", name) for name in BLOCK_TYPES]
PACKED += [("gpt_oss", name) for name in ("MXFP4", "Q4_K", "Q6_K")]
each_packed_model = pytest.mark.parametrize(("family", "kind"), PACKED)


def matrices(module: Any) -> dict[str, torch.Tensor]:
    """The matrices of an experts module, (n_experts, out, in) in its compute dtype, and its biases."""
    found = {}
    for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        value = getattr(module, name, None)
        if isinstance(value, tuple):
            assert all(isinstance(each, PackedWeights) for each in value)
            found[name] = torch.cat([each.unpack(module.compute_dtype) for each in value], dim=1)
        elif value is not None:
            found[name] = value.transpose(1, 2) if module.is_transposed and value.ndim == 3 else value
    return found


@each_packed_model
def test_experts_stay_packed_and_hold_the_numbers_of_the_file(tmp_path: Path, family: str, kind: str) -> None:
    """Read as rows, and as tiles where this CPU multiplies these, of short dtypes."""
    path = models.write_model(family, tmp_path, kind)
    tensors = models.unpacked(path)
    for layer, chosen, dtype in (
        (0, [6, 1, 2, 7], torch.float32),
        (1, [3], torch.float32),
        (0, [6, 1], torch.bfloat16),
    ):
        checkpoint = Checkpoint.open(path, dtype=dtype)
        module: Any = checkpoint.build_experts(layer, chosen, CPU, in_tiles=dtype is torch.bfloat16)
        assert [each.format.name for each in module.gate_up_proj + module.down_proj] == [kind.lower()] * 2
        expected = models.experts_of(tensors, layer, interleaved=family == "gpt_oss")
        got = matrices(module)
        assert got.keys() == expected.keys()
        for name, values in got.items():
            assert torch.equal(values, expected[name][chosen].to(dtype)), name


@each_packed_model
def test_an_expert_read_after_others_is_the_one_read_alone(tmp_path: Path, family: str, kind: str) -> None:
    checkpoint = Checkpoint.open(models.write_model(family, tmp_path, kind), dtype=torch.bfloat16)
    for in_tiles in (False, True):
        assert_read_alone(checkpoint, 0, in_tiles=in_tiles)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_experts_are_parameters(tmp_path: Path, family: str, kind: str) -> None:
    path = models.write_model(family, tmp_path, kind)
    checkpoint = Checkpoint.open(path, dtype=torch.bfloat16)
    module = checkpoint.build_experts(1, [5, 0], CPU)
    assert isinstance(module.gate_up_proj, torch.nn.Parameter)
    for name, values in models.experts_of(models.unpacked(path), 1, interleaved=family == "gpt_oss").items():
        assert torch.equal(matrices(module)[name], values[[5, 0]].bfloat16()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_without_kernels_are_unpacked_to_the_compute_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    path = models.write_model("gpt_oss", tmp_path, "Q5_1", down_kind="Q4_1")
    checkpoint = Checkpoint.open(path, dtype=dtype)
    got, tiles = (matrices(checkpoint.build_experts(0, range(8), CPU, in_tiles=each)) for each in (False, True))
    for name, values in models.experts_of(models.unpacked(path), 0, interleaved=True).items():
        assert torch.equal(got[name], values.to(dtype)), name
        assert torch.equal(tiles[name], values.to(dtype)), name


DENSE = {"qwen3_moe": "Q5_1", "qwen2_moe": "Q5_K", "gpt_oss": "Q5_K", "minimax_m2": "Q5_K"}


@pytest.mark.parametrize(("family", "dense_kind"), DENSE.items())
def test_config_and_dense_tensors_are_those_of_the_model(tmp_path: Path, family: str, dense_kind: str) -> None:
    path = models.write_model(family, tmp_path, "Q8_0", dense_kind=dense_kind)
    checkpoint = Checkpoint.open(path, dtype=torch.float32)
    source = Checkpoint.open(tmp_path)
    for name in ("vocab_size", "rope_parameters", "num_attention_heads", "head_dim", "tie_word_embeddings"):
        stated = getattr(source.config, name, None)
        assert stated is None or getattr(checkpoint.config, name) == stated, name
    assert (checkpoint.top_k, checkpoint.hidden_size, len(checkpoint.layers)) == (2, models.WIDTH, 2)
    model = load_dense_model(checkpoint, CPU)
    reference = models.reference_model(tmp_path, path, torch.float32)
    assert not [name for name in checkpoint.dense_tensors() if "experts" in name.split(".")]
    dense = {name: value for name, value in reference.named_parameters() if ".experts." not in name}
    assert dense.keys() == dict(model.named_parameters()).keys()
    for name, value in model.named_parameters():
        assert torch.equal(value, dense[name]), name
    for name, value in reference.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], value), name


def test_a_file_made_for_llama_cpp_is_read(tmp_path: Path) -> None:
    """By a writer that shares nothing with the others here; its output is what llama.cpp's tools run and quantise."""
    write_tiny("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    write_for_llama_cpp(tmp_path, tmp_path / "m.gguf")
    source, got = Checkpoint.open(tmp_path), Checkpoint.open(tmp_path / "m.gguf")
    for name, values in matrices(source.build_experts(1, [3, 4], CPU)).items():
        assert torch.equal(matrices(got.build_experts(1, [3, 4], CPU))[name], values), name
    dense = load_dense_model(got, CPU).state_dict()
    for name, values in load_dense_model(source, CPU).state_dict().items():
        assert torch.equal(dense[name], values), name


def test_the_tokenizer_is_in_the_file(tmp_path: Path) -> None:
    path = models.write_model("qwen3_moe", tmp_path, "Q8_0")
    got, expected = load_tokenizer(Checkpoint.open(path)), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Hello world, 12 + 30 = ?", "größer\n\n\tals <eos> und <bos>", ""):
        assert got(text)["input_ids"] == expected(text)["input_ids"]
        assert got.decode(got(text)["input_ids"]) == expected.decode(expected(text)["input_ids"])
    chat = [{"role": "user", "content": "hi"}]
    assert got.apply_chat_template(chat, tokenize=False) == expected.apply_chat_template(chat, tokenize=False)
    assert (got.eos_token_id, got.pad_token_id) == (expected.eos_token_id, expected.pad_token_id)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 1}, "layers 1, there 2"),
        ({"hidden_size": 128}, "hidden size 128, there 256"),
        ({"num_experts_per_tok": 3}, "experts for each row 3, there 2"),
        ({"num_experts": 4}, "first dimension must be 4"),
        ({"intermediate_size": 128}, "the stored tensors give shape"),
        ({"num_hidden_layers": 3000}, "claims 3000 layers"),
        ({"model_type": "mixtral"}, "of another model"),
        ({"model_type": "nothing\nERROR"}, "model_type 'nothing"),
        ({"num_attention_heads": 1e9}, "num_attention_heads is 1000000000"),
    ],
    ids=str,
)
def test_the_folder_of_another_model_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = models.write_model("olmoe", tmp_path, "Q8_0")
    if change == {"model_type": "mixtral"}:
        change = {**change, "num_local_experts": 8, "num_hidden_layers": 1}
    edit_config(tmp_path, **change)
    text = (tmp_path / "config.json").read_text()
    for how in ({"dense": tmp_path}, {"config_text": text}):
        with pytest.raises(ModelError, match=words) as caught:
            Checkpoint.open(path, **how)
        assert str(caught.value).isprintable()


def test_a_folder_with_other_weights_is_refused(tmp_path: Path) -> None:
    path = models.write_model("olmoe", tmp_path, "Q8_0")
    other = tmp_path / "other"
    models.write_checkpoint(models.wide_config("olmoe"), other, seed=5)
    with pytest.raises(ModelError, match=r"another model .*mlp\.gate\.weight differs from blk\.0\.ffn_gate_inp"):
        Checkpoint.open(path, dense=other)
    with pytest.raises(ModelError, match="--dense: goes with a GGUF file"):
        Checkpoint.open(tmp_path, dense=tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"model_type": 7}', "{}", '"' + "x" * 300_000 + '"'])
def test_a_config_from_the_network_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = models.write_model("olmoe", tmp_path, "Q8_0")
    with pytest.raises(ModelError, match="the host's config"):
        Checkpoint.open(path, config_text=text)


def test_experts_of_a_type_without_kernels_are_refused_by_name(tmp_path: Path) -> None:
    path = models.write_model("qwen3_moe", tmp_path, "TQ2_0")
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_gate_exps\.weight: is of type TQ2_0; experts are computed from"):
        Checkpoint.open(path)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("Q4_K", torch.bfloat16)])
def test_the_compute_dtype_follows_the_matrices(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    path = models.write_model("qwen3_moe", tmp_path, kind, dense_kind=kind)
    assert Checkpoint.open(path).dtype is dtype
    assert Checkpoint.open(path, dtype=torch.float32).dtype is torch.float32


def test_the_digest_names_numbers_and_not_places(tmp_path: Path) -> None:
    path = models.write_model("qwen3_moe", tmp_path, "Q4_K")
    parts = models.write_model("qwen3_moe", tmp_path, "Q4_K", name="cut.gguf", part_tensors=10)
    digest = Checkpoint.open(path).digest
    assert parts.name == "cut-00001-of-00003.gguf"
    assert Checkpoint.open(parts).digest == digest
    data = path.read_bytes()
    last = max(Checkpoint.open(path)._source.index.values(), key=lambda tensor: tensor.offset)
    other = tmp_path / "other.gguf"
    other.write_bytes(data[: last.offset] + bytes([data[last.offset] ^ 1]) + data[last.offset + 1 :])
    assert Checkpoint.open(other).digest != digest
    assert Checkpoint.open(models.write_model("qwen3_moe", tmp_path, "Q5_K", name="q5.gguf")).digest != digest


def test_nobody_reads_what_it_does_not_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.write_model("qwen3_moe", tmp_path, "Q4_K")
    checkpoint = Checkpoint.open(path)
    tensors = checkpoint._source.index
    read: list[tuple[int, int]] = []
    preadv = os.preadv

    def watched(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        read.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", watched)
    load_dense_model(checkpoint, CPU)
    experts = [tensor for name, tensor in tensors.items() if "_exps" in name]
    assert len(experts) == 6
    for tensor in experts:
        assert all(end <= tensor.offset or start >= tensor.offset + tensor.nbytes for start, end in read)
    assert sum(end - start for start, end in read) == sum(
        tensor.nbytes for name, tensor in tensors.items() if "_exps" not in name
    )
    read.clear()
    for expert in (2, 5):  # one by one: a thread reads matrices after its first without Python
        checkpoint.build_experts(1, [expert], CPU)
    of_layer = [tensors[f"blk.1.ffn_{which}_exps.weight"] for which in ("gate", "up", "down")]
    assert sum(end - start for start, end in read) == sum(tensor.nbytes for tensor in of_layer) * 2 // 8


def test_metadata_that_gives_no_config_is_refused(tmp_path: Path) -> None:
    path = models.write_model("qwen3_moe", tmp_path, "Q8_0")
    data = path.read_bytes()
    for old, new, words in (
        (b"qwen3moe.block_count", b"qwen3moe.block_cOunt", "has no qwen3moe.block_count"),
        (b"qwen3moe.expert_count\x04\0\0\0\x08", b"qwen3moe.expert_count\x04\0\0\0\x07", "first dimension must be 7"),
        (b"\x08\0\0\0\0\0\0\0qwen3moe", b"\x08\0\0\0\0\0\0\0qwen9moe", "architecture 'qwen9moe'"),
    ):
        assert old in data
        path.write_bytes(data.replace(old, new))
        with pytest.raises(ModelError, match=words):
            Checkpoint.open(path)
