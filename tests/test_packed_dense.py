"""The host's linear layers stay packed as they are stored, or are packed while they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tasks
import torch
from conftest import DEMO
from synthetic import write_tiny
from test_expert_format import answers
from torch import nn

from moeoffload import open_model
from moeoffload.checkpoint.tensors import StoredTensor, TensorReader
from moeoffload.host import packed_dense
from moeoffload.kernels.packed_linear import PackedLinear

PROMPT = torch.randint(5, 250, (1, 40), generator=torch.manual_seed(3))


def packed_layers(model: nn.Module) -> set[str]:
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, PackedLinear)}


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_packed_linear_layers_compute_with_the_stored_numbers(form: str, tmp_path: Path) -> None:
    folder = write_tiny("qwen3_moe", tmp_path, form=form, dtype=torch.bfloat16)
    with open_model(folder, local_experts_gib=8.0, device="cpu") as offloaded, torch.no_grad():
        model = offloaded.model
        assert packed_layers(model) >= {"q_proj", "k_proj", "v_proj", "o_proj"}
        assert offloaded.report().to_json()["model"]["dense_format"]
        packed = model(PROMPT).logits
        for name, module in list(model.named_modules()):
            if isinstance(module, PackedLinear):
                plain = nn.Linear(module.in_features, module.out_features, bias=False, dtype=torch.bfloat16)
                plain.weight.data = module.weight.unpack(torch.bfloat16)[0]
                model.set_submodule(name, plain)
        # Where the routers of these random weights decide otherwise, a position and later ones are others.
        first, expected = packed[:, 0].float(), model(PROMPT).logits[:, 0].float()
        assert (first - expected).norm() <= 2**-5 * expected.norm()


def test_dense_weights_are_read_once_and_again_only_where_transformers_changes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny("qwen3_moe", tmp_path, form="int4", dtype=torch.bfloat16)
    read, read_into = list[str](), TensorReader._read_into

    def counted(self: TensorReader, tensor: StoredTensor, *where: Any) -> None:
        read.append(tensor.name)
        read_into(self, tensor, *where)

    monkeypatch.setattr(TensorReader, "_read_into", counted)
    with open_model(folder, local_experts_gib=8.0, device="cpu") as offloaded, torch.no_grad():
        packed = offloaded.model(PROMPT).logits
        assert packed_layers(offloaded.model)
    dense = [name for name in read if ".experts." not in name]
    assert len(dense) == len(set(dense)) > 0
    monkeypatch.setattr(packed_dense, "_is_same", lambda packed, weight: False)
    with open_model(folder, local_experts_gib=8.0, device="cpu") as offloaded, torch.no_grad():
        assert not packed_layers(offloaded.model)
        assert (packed - offloaded.model(PROMPT).logits).abs().max() < 0.02 * packed.abs().max()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_linear_layers_packed_while_they_load_solve_the_tasks(name: str, three_servers: list[str]) -> None:
    prompts = tasks.prompts(64, seed=7)
    with open_model(DEMO, experts=three_servers[:1], device="cpu", dense_format=name) as offloaded:
        assert packed_layers(offloaded.model) == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
        assert offloaded.model.lm_head.weight.format.name == "int8"
        texts = answers(offloaded, prompts)
    right = sum(tasks.check(prompt, text) for prompt, text in zip(prompts, texts, strict=True))
    assert 100 * right / len(prompts) >= 97
