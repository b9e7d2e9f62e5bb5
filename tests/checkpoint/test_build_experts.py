"""A subset of the experts is bit for bit what transformers loads, whatever the family, storage and device."""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEMO
from synthetic import TINY_FAMILIES, Layout, write_checkpoint, write_tiny
from test_staging import Runtime
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.copy_buffers import CopyBuffers, Pair
from moeoffload.checkpoint.tensors import StoredTensor, TensorReader
from moeoffload.errors import ModelError
from moeoffload.page_locked import PageLocked

from .conftest import CPU, reference_model, rewrite
from .quantised import CASES, Case, write

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


TEXT = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 32, "moe_intermediate_size": 32, "pad_token_id": 0,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_heads": 2}
# Families that are stored or built in a way of their own: config, what it is loaded as, width of a row, top_k, modules.
UNUSUAL: dict[str, tuple[dict[str, Any], Any, int, int, str]] = {
    # A multimodal model, whose conversion looks at shapes.
    "qwen3_vl_moe": (
        {
            "text_config": TEXT | {"num_experts": N_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            "vision_config": VISION | {
                "depth": 1, "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]
            },
        },
        AutoModelForImageTextToText, 64, 2, "model.language_model.layers.0.mlp.experts",
    ),
    # Rows of an expert are narrower than the model's, and as wide as there are experts: the norm behind the experts,
    # which they share, must not be taken for one row per expert.
    "muse_spark": (
        {
            "text_config": TEXT | {
                "num_local_experts": N_EXPERTS, "num_experts_per_tok": 2, "moe_hidden_size": N_EXPERTS
            },
            "vision_config": VISION | {"num_hidden_layers": 1},
            "audio_config": {"hidden_sizes": [8] * 4, "depths": [1] * 4, "out_hidden_size": 64},
            "out_hidden_size": 128, "projector_hidden_size": 32,
        },
        AutoModelForImageTextToText, N_EXPERTS, 2, "model.language_model.layers.0.mlp.experts",
    ),
    # The router keeps its top_k in the config.
    "gemma4_text": (
        TEXT | {
            "vocab_size_per_layer_input": 320, "global_head_dim": 16, "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
            "enable_moe_block": True, "num_experts": N_EXPERTS, "top_k_experts": 3,
        },
        AutoModelForCausalLM, 64, 3, "model.layers.0.experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", [*UNUSUAL, "qwen3_vl_moe transposed"])
def test_families_that_are_stored_or_built_in_a_way_of_their_own(family: str, tmp_path: Path) -> None:
    family, _, stored = family.partition(" ")
    config, auto, hidden_size, top_k, module_name = UNUSUAL[family]
    write_checkpoint(CONFIG_MAPPING[family](**config), tmp_path, dtype=torch.float32)
    if stored == "transposed":

        def turn(tensors: dict[str, torch.Tensor]) -> None:
            tensors |= {name: each.transpose(1, 2) for name, each in tensors.items() if ".mlp.experts." in name}

        rewrite(tmp_path, turn)
    model = reference_model(tmp_path, auto)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.model_class is type(model)
    assert (checkpoint.hidden_size, checkpoint.top_k) == (hidden_size, top_k)
    assert checkpoint.layers[0].module_name == module_name
    assert_same_experts(checkpoint, model)


def test_experts_of_a_family_that_stacks_them_may_be_stored_one_by_one(tmp_path: Path) -> None:
    config, auto, *_ = UNUSUAL["qwen3_vl_moe"]
    write_checkpoint(CONFIG_MAPPING["qwen3_vl_moe"](**config), tmp_path, dtype=torch.float32)
    model = reference_model(tmp_path, auto)

    def unstack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".mlp.experts." in name]:
            base, _, leaf = name.rpartition(".")
            del tensors[name]
            parts = model.get_parameter(name).detach().chunk(2 if leaf == "gate_up_proj" else 1, dim=1)
            for part, weights in zip(("gate_proj", "up_proj") if len(parts) > 1 else (leaf,), parts, strict=True):
                tensors |= {f"{base}.{i}.{part}.weight": weight.clone() for i, weight in enumerate(weights)}

    rewrite(tmp_path, unstack)
    assert_same_experts(Checkpoint.open(tmp_path), model)


def test_a_large_layer_is_filled_group_by_group(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Checkpoint.open(tiny).build_experts(0, [7, 1, 2, 3, 0], CPU)
    monkeypatch.setattr("moeoffload.checkpoint.checkpoint._GROUP_BYTES", 40_000)
    grouped = Checkpoint.open(tiny).build_experts(0, [7, 1, 2, 3, 0], CPU)
    for name, parameter in grouped.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name))


def test_modules_do_not_share_anything_that_changes(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    first, second = (checkpoint.build_experts(0, experts, CPU) for experts in ([0], [1, 2]))
    assert (first.num_experts, second.num_experts) == (1, 2)
    assert first.config is not second.config
    assert checkpoint.layers[0].n_experts == 8


@pytest.mark.parametrize(
    ("layer", "experts", "allowed"),
    [(0, [], "0..7"), (0, [8], "0..7"), (0, [-1], "0..7"), (0, [0, 99], "0..7"), (2, [0], "0..1")],
)
def test_experts_and_layers_that_are_not_there_are_refused(
    layer: int, experts: list[int], allowed: str, tiny: Path
) -> None:
    with pytest.raises(ModelError, match=rf"layer {layer}: .* {re.escape(allowed)}"):
        Checkpoint.open(tiny).build_experts(layer, experts, CPU)


class Late(CopyBuffers):
    """Copies as late as a device may: when they are waited for."""

    def __init__(self, n_bytes: int, driver: Runtime) -> None:
        super().__init__(n_bytes)
        self.driver, self.open, self.most_open, self.most_locked = driver, 0, 0, 0

    def serve(self, device: torch.device) -> bool:
        return True

    def _lock(self, memory: memoryview, device: torch.device) -> PageLocked:
        return PageLocked([memory], device, self.driver)

    def _begin(self, device: torch.device) -> None:
        self.most_locked = max(self.most_locked, sum(n_bytes for _, n_bytes in self.driver.locked))

    def _start(self, pairs: Iterable[Pair], device: torch.device) -> Callable[[], object]:
        pairs = list(pairs)
        self.open += 1
        self.most_open = max(self.most_open, self.open)

        def wait() -> None:
            for to, source in pairs:
                to.copy_(source)
            self.open -= 1

        return wait


def tensors(module: Any) -> dict[str, torch.Tensor]:
    """All bytes of the weights."""
    found = dict(module.named_parameters())
    for name in ("gate_up_proj", "down_proj"):
        parts = getattr(module, name)
        for number, part in enumerate(parts if isinstance(parts, tuple) else ()):
            found[f"{name}.{number}"] = part.data
            if part.scales is not None:
                found[f"{name}.{number}.scales"] = part.scales
    return found


def same_with_buffers(checkpoint: Checkpoint, n_bytes: int, error: int = 0) -> Late:
    """Builds all layers with and without buffers of ``n_bytes``; the bytes are the same."""
    experts = [*range(1, checkpoint.layers[0].n_experts), 0]
    with Late(n_bytes, Runtime(error)) as buffers:
        for layer in checkpoint.layers:
            through = tensors(checkpoint.build_experts(layer.index, experts, CPU, buffers=buffers))
            assert buffers.open == 0, "experts are there when they are handed out"
            for name, values in tensors(checkpoint.build_experts(layer.index, experts, CPU)).items():
                assert torch.equal(through[name], values), name
    assert buffers.driver.locked == []
    return buffers


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_experts_are_those_that_are_read_in_place(case: Case, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(case, tmp_path))
    same_with_buffers(checkpoint, 3 * checkpoint.layers[0].expert_bytes)


def test_one_buffer_is_filled_while_the_other_is_copied() -> None:
    checkpoint = Checkpoint.open(DEMO)
    n_bytes = 5 * checkpoint.layers[0].expert_bytes // 2
    buffers = same_with_buffers(checkpoint, n_bytes)
    assert buffers.most_open == 2
    assert 0 <= buffers.most_locked - 2 * n_bytes < 2 * mmap.PAGESIZE, "all layers went through the same two"


def test_an_expert_larger_than_a_buffer_makes_it_larger() -> None:
    assert same_with_buffers(Checkpoint.open(DEMO), 1).most_locked > 2


def test_experts_that_are_converted_need_no_buffers(tmp_path: Path) -> None:
    assert same_with_buffers(Checkpoint.open(write_tiny("gpt_oss", tmp_path)), 1 << 20).most_locked == 0


def test_memory_that_cannot_be_locked_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        same_with_buffers(Checkpoint.open(DEMO), 1 << 20, error=2)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["2097152 bytes are not page-locked for CUDA (error 2)"]


def test_a_copy_is_waited_for_when_reading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(DEMO)
    with Late(2 * checkpoint.layers[0].expert_bytes, Runtime()) as buffers:
        read = TensorReader.read_part

        def fail(self: TensorReader, tensor: StoredTensor, *rest: Any) -> torch.Tensor:
            if ".experts.20." in tensor.name:
                raise ModelError("cut short")
            return read(self, tensor, *rest)

        monkeypatch.setattr(TensorReader, "read_part", fail)
        with pytest.raises(ModelError, match="cut short"):
            checkpoint.build_experts(0, range(32), CPU, buffers=buffers)
        assert (buffers.open, buffers.most_open) == (0, 2)
