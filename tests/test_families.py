"""Every decorated family gives the logits of a local run with two servers; docs/families.md lists what is tested."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import ROOT, local_model
from synthetic import TINY_FAMILIES, Layout, write_tiny

from moeoffload import open_model

BOUND = 1e-5
"""Largest difference of logits relative to the largest logit, in float32."""


def largest_relative_difference(folder: Path, servers: list[str]) -> float:
    """Of the logits of a prompt and of one decode step, offloaded against local."""
    prompt = torch.randint(3, 300, (1, 50), generator=torch.manual_seed(5))
    local = local_model(folder, dtype=torch.float32)
    with open_model(folder, experts=servers, model_dtype="f32", device="cpu") as offloaded, torch.inference_mode():
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


@pytest.mark.parametrize("shard_bytes", [None, 40_000], ids=["one-file", "sharded"])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_family_gives_the_logits_of_a_local_run(
    three_servers: list[str], tmp_path: Path, family: str, layout: Layout, shard_bytes: int | None
) -> None:
    write_tiny(family, tmp_path, layout=layout, shard_bytes=shard_bytes)
    assert largest_relative_difference(tmp_path, three_servers[:2]) <= BOUND


def test_the_documented_families_are_the_tested_ones() -> None:
    text = (ROOT / "docs" / "families.md").read_text()
    assert [family for family in TINY_FAMILIES if f"| {family} |" not in text] == []
