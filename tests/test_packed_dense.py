"""The host's linear layers stay packed as they are stored, or are packed while they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import tasks
import torch
from conftest import DEMO
from synthetic import write_tiny
from test_expert_format import answers
from torch import nn

from moeoffload import open_model
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
        assert (packed - model(PROMPT).logits).abs().max() < 0.02 * packed.abs().max()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_linear_layers_packed_while_they_load_solve_the_tasks(name: str, three_servers: list[str]) -> None:
    prompts = tasks.prompts(64, seed=7)
    with open_model(DEMO, experts=three_servers[:1], device="cpu", dense_format=name) as offloaded:
        assert packed_layers(offloaded.model) == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
        assert offloaded.model.lm_head.weight.format.name == "int8"
        texts = answers(offloaded, prompts)
    right = sum(tasks.check(prompt, text) for prompt, text in zip(prompts, texts, strict=True))
    assert 100 * right / len(prompts) >= 97
