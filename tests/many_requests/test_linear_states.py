"""Requests of models with layers of linear attention, whose states belong to one request each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import local_model, n_tokens
from synthetic import write_tiny

from moeoffload import open_model
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.request import FinishReason

from .client import ask, limits

N_NEW = 40


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "granitemoehybrid", "nemotron_h"])
def test_requests_together_get_the_tokens_of_each_alone(family: str, three_servers: list[str], tmp_path: Path) -> None:
    """Prompts in parts and whole, in halves of a step, one cancelled, more than run at a time, and preempted ones."""
    write_tiny(family, tmp_path)
    local = local_model(tmp_path).float()
    local.generation_config.eos_token_id = None
    prompts = [torch.randint(5, 300, (1, n), generator=torch.manual_seed(n)) for n in (1, 17, 30, 70, 150, 200)]
    expected = [n_tokens(local, ids, N_NEW) for ids in prompts]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    exact: dict[str, Any] = {"model_dtype": "f32", "dtype": "f32", "device": "cpu", "threads": 1}
    with open_model(tmp_path, experts=three_servers[:2], **exact) as offloaded:
        alone = offloaded.model.generate(prompts[3], max_new_tokens=N_NEW, do_sample=False, eos_token_id=None)
        cases: tuple[dict[str, Any], ...] = (
            {"prefill_chunk": 64},
            {"prefill_chunk": 64, "max_running": 2},
            {"kv_gib": 0.0003},
        )
        for settings in cases:
            with ServingEngine(offloaded, limits(**settings)) as engine:
                gone = ask(engine, prompts[4][0].tolist(), 300, ignore_eos=True)
                answers = [ask(engine, ids[0].tolist(), N_NEW, ignore_eos=True) for ids in prompts]
                gone.cancel()
                assert {answer.finish for answer in answers} == {FinishReason.LENGTH}
                assert engine.stats.tokens.reused == 0
            assert [answer.tokens for answer in answers] == expected, settings
        again = offloaded.model.generate(prompts[3], max_new_tokens=N_NEW, do_sample=False, eos_token_id=None)
    assert torch.equal(alone, again)
    assert again[0, 70:].tolist() == expected[3]
