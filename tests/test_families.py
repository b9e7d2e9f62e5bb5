"""Every decorated family gives the logits of a local run with two servers; docs/families.md lists what is tested."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, local_model
from synthetic import TINY_FAMILIES, Layout, write_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from moeoffload import open_model
from moeoffload.errors import ModelError

BOUND = 1e-5
"""Largest difference of logits relative to the largest logit, in float32."""


def largest_relative_difference(folder: Path, servers: list[str], **options: Any) -> float:
    """Of the logits of a prompt and of one decode step, offloaded against local."""
    prompt = torch.randint(3, 300, (1, 50), generator=torch.manual_seed(5))
    local = local_model(folder, dtype=torch.float32)
    with (
        open_model(folder, experts=servers, model_dtype="f32", device="cpu", **options) as offloaded,
        torch.inference_mode(),
    ):
        assert all(link.info.n_experts for link in offloaded.links)
        worst = 0.0
        cache, local_cache = None, None
        for tokens in (prompt, prompt[:, :1]):
            got = offloaded.model(tokens, past_key_values=cache, use_cache=True)
            expected = local(tokens, past_key_values=local_cache, use_cache=True)
            cache, local_cache = got.past_key_values, expected.past_key_values
            scale = expected.logits.abs().max()
            assert scale > 0
            worst = max(worst, float((got.logits - expected.logits).abs().max() / scale))
        return worst


@pytest.mark.parametrize(
    ("family", "layout"), zip(TINY_FAMILIES, itertools.cycle(Layout)), ids=lambda value: str(value)
)
def test_a_family_gives_the_logits_of_a_local_run(
    three_servers: list[str], tmp_path: Path, family: str, layout: Layout
) -> None:
    # Every family from every layout: tests/checkpoint. Here one each: one file, and experts that lie in several.
    write_tiny(family, tmp_path, layout=layout, shard_bytes=None if layout is Layout.FUSED else 40_000)
    assert largest_relative_difference(tmp_path, three_servers[:2]) <= BOUND


@pytest.mark.parametrize("local_gib", [0.0, 1e-4])
def test_a_router_that_chooses_fewer_experts_than_the_config_says(
    three_servers: list[str], tmp_path: Path, local_gib: float
) -> None:
    """Phimoe's always chooses two."""
    config = AutoConfig.for_model(
        "phimoe", vocab_size=320, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=4, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(6)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    assert largest_relative_difference(tmp_path, three_servers[:2], local_experts_gib=local_gib) <= BOUND


@pytest.mark.parametrize(("family", "words"), [("qwen3_moe", "there is no tokenizer"), ("mixtral", "cannot be read")])
def test_a_folder_without_a_tokenizer_is_used_without_one(
    three_servers: list[str], tmp_path: Path, family: str, words: str
) -> None:
    write_tiny(family, tmp_path)
    for path in tmp_path.glob("token*"):
        path.unlink()
    assert largest_relative_difference(tmp_path, three_servers[:1]) <= BOUND
    missing = pytest.raises(ModelError, match=words)
    with open_model(tmp_path, experts=three_servers[:1], device="cpu") as offloaded, missing:
        _ = offloaded.tokenizer


def test_the_documented_families_are_the_tested_ones() -> None:
    text = (ROOT / "docs" / "families.md").read_text()
    assert [family for family in TINY_FAMILIES if f"| {family} |" not in text] == []
