"""The same prompt gives the same tokens as a local run: every mode, transport, payload dtype, number of servers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import DEMO, demo_prompt, local_model
from local_experts import register_local_experts
from models import answers, demo_inputs, local_answers, percent_right

from moeoffload import open_model
from moeoffload.kernels.fast_dense import accelerate_dense

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize(("model_dtype", "transport"), [("f32", "shared"), ("bf16", "shared"), ("bf16", "stream")])
def test_the_grouped_kernel_gives_the_bits_of_a_local_run(
    grouped_server: str, model_dtype: str, transport: str
) -> None:
    prompt = torch.randint(5, 60, (1, 700), generator=torch.manual_seed(1))
    local = local_model(DEMO, dtype=TORCH[model_dtype])
    options: dict[str, Any] = {"mode": "batched", "transport": transport, "model_dtype": model_dtype}
    with (
        open_model(DEMO, experts=[grouped_server], fast_dense=False, device="cpu", **options) as offloaded,
        torch.inference_mode(),
    ):
        for tokens in (prompt, prompt[:, :1], prompt[:, :9]):
            assert torch.equal(offloaded.model(tokens).logits, local(tokens).logits)


@pytest.mark.parametrize("model_dtype", ["f32", "bf16"])
def test_the_default_kernel_gives_the_bits_of_a_local_run_with_it_in_every_mode(
    three_servers: list[str], model_dtype: str
) -> None:
    local = local_model(DEMO, dtype=TORCH[model_dtype], experts_implementation=register_local_experts())
    accelerate_dense(local)
    prompt = demo_prompt(700, seed=2)
    parts = (prompt, prompt[:, :1], prompt[:, :9])
    with torch.inference_mode():
        expected = [local(tokens).logits for tokens in parts]
        for mode, transport in (("batched", "shared"), ("stream", "shared"), ("auto", "stream")):
            options: dict[str, Any] = {"mode": mode, "transport": transport, "model_dtype": model_dtype}
            with open_model(DEMO, experts=three_servers[:1], batch_capacity=300, device="cpu", **options) as offloaded:
                for tokens, logits in zip(parts, expected, strict=True):
                    assert torch.equal(offloaded.model(tokens).logits, logits), (mode, tokens.shape)


@pytest.mark.parametrize(
    ("mode", "transport", "n_servers", "dtype", "model_dtype"),
    [("batched", "shared", 3, "f16", "bf16"), ("batched", "stream", 1, "f32", "bf16"),
     ("stream", "shared", 2, "bf16", "bf16"), ("stream", "stream", 3, "f16", "bf16"),
     ("auto", "shared", 1, "f32", "bf16"), ("auto", "stream", 2, "bf16", "bf16"),
     ("stream", "shared", 1, "f32", "f32"), ("batched", "stream", 3, "f32", "f32")],
)  # fmt: skip
def test_greedy_tokens_and_accuracy_match_a_local_run(
    three_servers: list[str], mode: str, transport: str, n_servers: int, dtype: str, model_dtype: str
) -> None:
    expected = local_answers(TORCH[model_dtype])
    options: dict[str, Any] = {"mode": mode, "transport": transport, "dtype": dtype, "model_dtype": model_dtype}
    with open_model(DEMO, experts=three_servers[:n_servers], device="cpu", **options) as offloaded:
        assert [link.info.transport for link in offloaded.links] == [transport] * n_servers
        got = answers(offloaded.model, demo_inputs())
    assert abs(percent_right(got) - percent_right(expected)) <= 100 / len(expected)
    if dtype != "f16":  # which does not hold every value of bf16
        assert got == expected


def test_the_demo_model_solves_its_tasks() -> None:
    assert percent_right(local_answers()) >= 95
