"""Rows and sums in 8 bits: half the bytes of bf16, close numbers, errors where a value cannot travel."""

from __future__ import annotations

from typing import Any

import pytest
import tasks
import torch
from conftest import DEMO
from test_expert_format import answers

from moeoffload import open_model
from moeoffload.errors import MoeOffloadError
from moeoffload.payload import F8_GROUP, PayloadDtype, load_rows, store_rows


@pytest.mark.parametrize("hidden", [2048, 130, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_come_back_as_close_as_8_bits_are(hidden: int, dtype: torch.dtype) -> None:
    rows = torch.randn(9, hidden, generator=torch.manual_seed(0)).to(dtype)
    rows[1], rows[2, :2], rows[3] = 0, 1e4, rows[3] * 1e-30
    stored = torch.empty(9, PayloadDtype.F8.columns(hidden), dtype=torch.uint8)
    assert store_rows(rows, stored) is None
    back = torch.empty(9, hidden)
    load_rows(stored, back)
    for start in range(0, hidden, F8_GROUP):
        group = rows[:, start : start + F8_GROUP].float()
        error = (back[:, start : start + F8_GROUP] - group).abs()
        # Half of the last of three binary places, or of the least number that the group's scale leaves.
        assert (error <= (group.abs() / 16).maximum(group.abs().amax(1, keepdim=True) / 448 / 1024)).all()
    rows[5, 0] = torch.inf
    assert store_rows(rows, stored) == 5


@pytest.mark.parametrize(("back", "transport"), [("auto", "shared"), ("bf16", "stream")])
def test_the_demo_solves_its_tasks(back: str, transport: str, three_servers: list[str]) -> None:
    prompts = tasks.prompts(64, seed=7)
    both: dict[str, Any] = {"experts": three_servers[:2], "device": "cpu", "transport": transport}
    with open_model(DEMO, **both) as offloaded:
        expected = answers(offloaded, prompts)
        full = offloaded.report().to_json()["phases"]["prefill"]
    with open_model(DEMO, dtype="f8", dtype_back=back, **both) as offloaded:
        texts = answers(offloaded, prompts)
        report = offloaded.report().to_json()
    assert report["run"]["payload_dtype"] == ("f8" if back == "auto" else "f8 out, bf16 back")
    assert report["phases"]["prefill"]["bytes_out"] < 0.75 * full["bytes_out"]
    right = sum(tasks.check(prompt, text) for prompt, text in zip(prompts, texts, strict=True))
    assert 100 * right / len(prompts) >= 95
    assert sum(one != other for one, other in zip(texts, expected, strict=True)) <= 6


def test_a_value_that_is_not_finite_is_an_error(three_servers: list[str]) -> None:
    with open_model(DEMO, experts=three_servers[:1], device="cpu", dtype="f8") as offloaded, torch.no_grad():
        offloaded.model.model.layers[0].post_attention_layernorm.weight[3] = torch.inf
        with pytest.raises(MoeOffloadError, match=r"layer 0, row 0.*not finite"):
            offloaded.model(torch.tensor([[5, 6, 7]]))
