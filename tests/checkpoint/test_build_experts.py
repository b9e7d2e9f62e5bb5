"""A subset of the experts is bit for bit what transformers loads, whatever the family and the storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import TINY_FAMILIES, Layout, write_checkpoint, write_tiny
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from moeoffload.checkpoint import Checkpoint
from moeoffload.errors import ModelError

from .conftest import CPU, reference_model, rewrite

# More than ten, because the names sort as 0, 1, 10, 11, 2, ...
N_EXPERTS = 12
SUBSETS = (tuple(range(N_EXPERTS)), (1, 3, 5, 7, 9, 11), (10,), (11, 10, 9, 2, 1, 0), (0, 1, 2, 7, 8, 4))


def assert_same_experts(checkpoint: Checkpoint, model: Any) -> None:
    for layer in checkpoint.layers:
        reference = model.get_submodule(layer.module_name)
        for experts in SUBSETS:
            module: Any = checkpoint.build_experts(layer.index, experts, CPU)
            assert type(module) is type(reference)
            assert module.num_experts == len(experts)
            assert not module.training
            assert module.config._experts_implementation == "eager"
            built = dict(module.named_parameters())
            assert built.keys() == dict(reference.named_parameters()).keys()
            for name, parameter in built.items():
                whole = reference.get_parameter(name)
                expected = whole[list(experts)] if "norm" not in name else whole
                assert torch.equal(parameter, expected), (layer, experts, name)
                assert not parameter.requires_grad


@pytest.mark.parametrize("shard_bytes", [None, 60_000], ids=["one-file", "sharded"])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_experts_equal_those_of_transformers(
    family: str, layout: Layout, shard_bytes: int | None, tmp_path: Path
) -> None:
    write_tiny(family, tmp_path, layout=layout, shard_bytes=shard_bytes, experts=N_EXPERTS)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_bytes is not None)
    model = reference_model(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert_same_experts(checkpoint, model)
    experts = sum(layer.n_experts * layer.expert_bytes for layer in checkpoint.layers)
    held = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    assert experts + checkpoint.dense_bytes == sum(held.values())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
def test_stored_and_compute_dtype_may_differ(family: str, tmp_path: Path) -> None:
    write_tiny(family, tmp_path, dtype=torch.bfloat16, experts=N_EXPERTS)
    checkpoint = Checkpoint.open(tmp_path, dtype=torch.float32)
    assert_same_experts(checkpoint, reference_model(tmp_path, dtype=torch.float32))
    assert checkpoint.build_experts(0, [0], CPU).down_proj.dtype is torch.float32
    assert checkpoint.layers[0].expert_bytes == 2 * Checkpoint.open(tmp_path).layers[0].expert_bytes


@pytest.mark.parametrize("stored_transposed", [False, True])
def test_multimodal_models_and_conversions_that_check_shapes(stored_transposed: bool, tmp_path: Path) -> None:
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
    }
    text = {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": N_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "pad_token_id": 0,
    }
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    write_checkpoint(
        CONFIG_MAPPING["qwen3_vl_moe"](text_config=text, vision_config=vision), tmp_path, dtype=torch.float32
    )
    if stored_transposed:
        rewrite(
            tmp_path,
            lambda tensors: tensors.update(
                {name: tensor.transpose(1, 2) for name, tensor in tensors.items() if ".mlp.experts." in name}
            ),
        )
    model = reference_model(tmp_path, AutoModelForImageTextToText)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.model_class is type(model)
    assert (checkpoint.hidden_size, checkpoint.top_k) == (64, 2)
    assert_same_experts(checkpoint, model)


def test_ungated_experts_and_other_module_names(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["nemotron_h"](
        vocab_size=320,
        hidden_size=64,
        layers_block_type=["moe", "attention", "moe"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=32,
        n_routed_experts=N_EXPERTS,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    )
    write_checkpoint(config, tmp_path, dtype=torch.float32)
    checkpoint = Checkpoint.open(tmp_path)
    assert [layer.module_name for layer in checkpoint.layers] == [
        "model.layers.0.mixer.experts",
        "model.layers.2.mixer.experts",
    ]
    assert_same_experts(checkpoint, reference_model(tmp_path))


def test_experts_on_narrower_rows_and_parameters_that_all_experts_share(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["muse_spark"](
        text_config={
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": N_EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            # As wide as there are experts: the norm behind the experts must not be taken for one row per expert.
            "moe_hidden_size": N_EXPERTS,
            "pad_token_id": 0,
        },
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1},
        audio_config={"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "out_hidden_size": 64},
        out_hidden_size=128,
        projector_hidden_size=32,
    )
    write_checkpoint(config, tmp_path, dtype=torch.float32)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.hidden_size == N_EXPERTS
    assert checkpoint.build_experts(0, [1], CPU).get_parameter("post_expert_norm.weight").shape == (N_EXPERTS,)
    assert_same_experts(checkpoint, reference_model(tmp_path, AutoModelForImageTextToText))


def test_router_that_keeps_its_top_k_in_the_config(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["gemma4_text"](
        vocab_size=320,
        vocab_size_per_layer_input=320,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=16,
        intermediate_size=64,
        hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        enable_moe_block=True,
        num_experts=N_EXPERTS,
        top_k_experts=3,
        moe_intermediate_size=32,
        pad_token_id=0,
    )
    write_checkpoint(config, tmp_path, dtype=torch.float32)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.top_k == 3
    assert_same_experts(checkpoint, reference_model(tmp_path))


def test_a_large_layer_is_filled_group_by_group(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Checkpoint.open(tiny).build_experts(0, [7, 1, 2, 3, 0], CPU)
    monkeypatch.setattr("moeoffload.checkpoint.checkpoint._GROUP_BYTES", 40_000)
    grouped = Checkpoint.open(tiny).build_experts(0, [7, 1, 2, 3, 0], CPU)
    for name, parameter in grouped.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name))


def test_built_experts_compute_what_the_whole_module_computes(tmp_path: Path) -> None:
    write_tiny("gpt_oss", tmp_path, experts=N_EXPERTS)
    checkpoint = Checkpoint.open(tmp_path)
    reference = reference_model(tmp_path, experts_implementation="eager").get_submodule(
        checkpoint.layers[1].module_name
    )
    experts = (9, 4)
    module = checkpoint.build_experts(1, experts, CPU)
    rows = torch.randn(5, checkpoint.hidden_size, generator=torch.Generator().manual_seed(0))
    weights = torch.full((5, 2), 0.5)
    with torch.no_grad():
        expected = reference(rows, torch.tensor([experts] * 5), weights)
        assert torch.equal(module(rows, torch.tensor([(0, 1)] * 5), weights), expected)


def test_modules_do_not_share_anything_that_changes(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    first, second = (checkpoint.build_experts(0, experts, CPU) for experts in ([0], [1, 2]))
    assert (first.num_experts, second.num_experts) == (1, 2)
    assert first.config is not second.config
    assert checkpoint.layers[0].n_experts == 8


@pytest.mark.parametrize("experts", [[], [8], [-1], [0, 99]])
def test_experts_that_are_not_there_are_refused(experts: list[int], tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"layer 0: .* 0\.\.7"):
        Checkpoint.open(tiny).build_experts(0, experts, CPU)


def test_layers_that_are_not_there_are_refused(tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"layer 2: .* 0\.\.1"):
        Checkpoint.open(tiny).build_experts(2, [0], CPU)
