"""Requests of models with layers of linear attention, whose states belong to one request each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import local_model, n_tokens
from synthetic import write_checkpoint, write_tiny
from transformers import CONFIG_MAPPING

from moeoffload import open_model
from moeoffload.errors import ModelError
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.request import FinishReason

from .client import ask, limits

N_NEW = 40
FAMILIES = ("qwen3_next", "qwen3_5_moe", "granitemoehybrid", "nemotron_h")


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_requests_together_get_the_tokens_of_each_alone(family: str, three_servers: list[str], tmp_path: Path) -> None:
    """Prompts in parts and whole, in halves of a step, one cancelled, more than run at a time, and preempted ones.

    The attention of gpt_oss has sinks, which torch's has not, and a window that some prompts fill.
    """
    has_window = family == "gpt_oss"
    window: dict[str, Any] = {"sliding_window": 24} if has_window else {}
    write_tiny(family, tmp_path, **window)
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
                assert has_window or engine.stats.tokens.reused == 0
            assert [answer.tokens for answer in answers] == expected, settings
        again = offloaded.model.generate(prompts[3], max_new_tokens=N_NEW, do_sample=False, eos_token_id=None)
    assert torch.equal(alone, again)
    assert again[0, 70:].tolist() == expected[3]


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_kept_where_a_conversation_goes_on_and_where_prompts_part(
    family: str, three_servers: list[str], tmp_path: Path
) -> None:
    write_tiny(family, tmp_path)
    local = local_model(tmp_path).float()
    local.generation_config.eos_token_id = None
    first, *others = (torch.randint(5, 300, (1, n), generator=torch.manual_seed(n)) for n in (150, 50, 40, 60))

    def answered(prompt: torch.Tensor, reused: int) -> torch.Tensor:
        answer = ask(engine, prompt[0].tolist(), 20, ignore_eos=True)
        assert answer.finish is FinishReason.LENGTH
        assert answer.tokens == n_tokens(local, prompt, 20)
        assert answer.progress[-1].reused_tokens == reused
        return torch.cat([prompt, torch.tensor([answer.tokens])], dim=1)

    exact: dict[str, Any] = {"model_dtype": "f32", "dtype": "f32", "device": "cpu", "threads": 1}
    with open_model(tmp_path, experts=three_servers[:2], **exact) as offloaded:
        with ServingEngine(offloaded, limits(prefill_chunk=64)) as engine:
            conversation = answered(first, reused=0)
            conversation = answered(torch.cat([conversation, others[0]], dim=1), reused=144)
            answered(torch.cat([conversation, others[1]], dim=1), reused=208)
            answered(torch.cat([first[:, :100], others[1]], dim=1), reused=0)  # the first that parts from it here
            answered(torch.cat([first[:, :100], others[2]], dim=1), reused=96)
            answered(conversation[:, :180], reused=144)
        with ServingEngine(offloaded, limits(prefix_reuse=False)) as engine:
            answered(first, reused=0)
            answered(first, reused=0)


def test_fewer_requests_run_where_memory_lacks_for_their_states_and_that_is_said(
    three_servers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny("qwen3_next", tmp_path)
    with (
        open_model(tmp_path, experts=three_servers[:1], device="cpu") as offloaded,
        ServingEngine(offloaded, limits(kv_gib=0.00004, max_running=32)) as engine,
    ):
        assert ask(engine, [5, 6, 7], 8, ignore_eos=True).finish is FinishReason.LENGTH
    assert "requests run at a time instead of 32" in caplog.text


@pytest.mark.parametrize(
    ("family", "values", "why"),
    [
        (
            "lfm2_moe",
            {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
            "layer 0 cannot go back after a wrong one",
        ),
        (
            "jamba",
            {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 8},
            "no arguments",
        ),
    ],
)
def test_what_cannot_be_told_apart_or_taken_back_is_refused(
    family: str, values: dict[str, Any], why: str, three_servers: list[str], tmp_path: Path
) -> None:
    small = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "intermediate_size": 32, "moe_intermediate_size": 32, "num_experts": 8}
    write_checkpoint(CONFIG_MAPPING[family](**small, num_experts_per_tok=2, **values), tmp_path, dtype=torch.float32)
    where: dict[str, Any] = {"experts": three_servers[:1], "device": "cpu"}
    if family == "lfm2_moe":
        with pytest.raises(ModelError, match=why):
            open_model(tmp_path, prompt_lookup=3, **where)
        return
    with open_model(tmp_path, **where) as offloaded, pytest.raises(ModelError, match=why):
        ServingEngine(offloaded, limits())
