"""``--expert-format``: servers pack experts while they load them; both sides compute with the same packed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tasks
import torch
from conftest import DEMO
from synthetic import write_tiny

from moeoffload import open_model
from moeoffload.checkpoint import Checkpoint
from moeoffload.errors import ModelError, SettingError
from moeoffload.formats.quantise import FORMATS

LEAST_RIGHT = {"int8": 99, "fp8": 97, "int4": 97, "mxfp4": 97}
"""Percent of the demo model's tasks that have to be solved."""


def answers(offloaded: Any, prompts: list[str]) -> list[str]:
    tokenizer = offloaded.tokenizer
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    tokens = offloaded.model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return list(tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("name", FORMATS)
def test_packed_experts_solve_the_tasks_wherever_they_are(name: str, three_servers: list[str]) -> None:
    prompts = tasks.prompts(64, seed=7)
    both: dict[str, Any] = {"experts": three_servers[:2], "device": "cpu", "expert_format": name}
    with open_model(DEMO, **both) as offloaded:
        remote = answers(offloaded, prompts)
        report = offloaded.report().to_json()
    right = sum(tasks.check(prompt, text) for prompt, text in zip(prompts, remote, strict=True))
    assert 100 * right / len(prompts) >= LEAST_RIGHT[name]
    stored = Checkpoint.open(DEMO)
    assert report["model"]["expert_format"] == name
    assert report["model"]["expert_bytes"] < 0.6 * sum(each.n_experts * each.expert_bytes for each in stored.layers)
    assert all(0 < error < 0.2 for server in report["servers"] for error in server["weight_errors"])
    with open_model(DEMO, local_experts_gib=64.0, **both) as offloaded:
        assert answers(offloaded, prompts) == remote


def test_experts_are_packed_the_same_in_any_choice_of_them() -> None:
    checkpoint = Checkpoint.open(DEMO, expert_format="int4")
    device = torch.device("cpu")
    some: Any = checkpoint.build_experts(1, [5, 2], device)
    every: Any = checkpoint.build_experts(1, range(checkpoint.layers[1].n_experts), device)
    for name in ("gate_up_proj", "down_proj"):
        (few,), (whole,) = getattr(some, name), getattr(every, name)
        assert torch.equal(few.data, whole.data[[5, 2]])
    per_expert = sum(getattr(every, name)[0].nbytes for name in ("gate_up_proj", "down_proj"))
    assert per_expert == checkpoint.layers[1].expert_bytes * checkpoint.layers[1].n_experts
    assert checkpoint.digest != Checkpoint.open(DEMO).digest


def test_a_host_asks_for_a_format_that_is_not_known() -> None:
    with pytest.raises(SettingError, match=r"expert_format: 'int3' is not allowed; allowed is keep, int8"):
        open_model(DEMO, expert_format="int3", experts=["127.0.0.1:1"])


def test_experts_that_are_stored_packed_stay_as_they_are(tmp_path: Path) -> None:
    packed_checkpoint = write_tiny("qwen3_moe", tmp_path, form="fp8")
    with pytest.raises(ModelError, match=r"its experts are stored as fp8; they cannot be packed again as int4"):
        Checkpoint.open(packed_checkpoint, expert_format="int4")
