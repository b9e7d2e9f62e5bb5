"""What a Python developer may do with an open model, in any mode of torch, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEMO, demo_prompt

from moeoffload import open_model
from moeoffload.errors import ModelError


def test_a_backward_pass_is_refused_and_a_forward_one_is_not(three_servers: list[str]) -> None:
    with open_model(DEMO, experts=three_servers[:1], device="cpu") as offloaded:
        logits = offloaded.model(torch.tensor([[5, 6, 7]])).logits
        with torch.no_grad():
            without = offloaded.model(torch.tensor([[5, 6, 7]])).logits
        assert torch.equal(without.argmax(-1), logits.argmax(-1))
        with pytest.raises(ModelError, match="no gradient passes through routed experts"):
            logits.float().sum().backward()


def test_saving_a_model_without_its_experts_is_refused(three_servers: list[str], tmp_path: Path) -> None:
    with (
        open_model(DEMO, experts=three_servers[:1], device="cpu") as offloaded,
        pytest.raises(ModelError, match="cannot be saved; copy"),
    ):
        offloaded.model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": contextlib.nullcontext,
}


@pytest.mark.parametrize(("opened_in", "local_gib"), [("inference", 0), ("no_grad", 0.001), ("grad", 0)])
def test_calls_of_any_size_work_after_a_call_in_another_mode(
    three_servers: list[str], opened_in: str, local_gib: float
) -> None:
    prompt = demo_prompt(200, seed=3)
    with MODES[opened_in]():
        offloaded = open_model(DEMO, experts=three_servers[:2], local_experts_gib=local_gib, device="cpu")
    expected: dict[tuple[int, bool], torch.Tensor] = {}
    with offloaded:
        for order in permutations(MODES):
            # One size for each number of rows that takes another way: a decode step, a few rows, a batch, a prompt.
            for n_rows in (1, 4, 40, 200):
                for mode in order:
                    with MODES[mode]():
                        logits = offloaded.model(prompt[:, :n_rows], logits_to_keep=1).logits.detach()
                    # With gradients the dense layers run transformers' own operations, which round otherwise.
                    known = expected.setdefault((n_rows, mode == "grad"), logits)
                    assert torch.equal(known, logits), (order, mode, n_rows)
        offloaded.model.generate(prompt, max_new_tokens=4, do_sample=False)
