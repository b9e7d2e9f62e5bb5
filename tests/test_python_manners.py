"""What a Python developer may try with an open model, and is told where it cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import DEMO

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
