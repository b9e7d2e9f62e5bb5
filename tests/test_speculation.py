"""Tokens that are guessed ahead and verified in one pass: fewer dispatches, the same text."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from command_lines import Commands
from conftest import DEMO

from moeoffload import open_model
from moeoffload.host.generate import generate, prepare_prompt
from moeoffload.host.session import OffloadedModel
from moeoffload.host.speculative import GuessLength

PROMPTS = ["sort abcabca =", "count z zazbzcz =", "add 111 111 =", "reverse abababa ="]
"""Their answers, and what the model babbles after them, repeat parts of them."""


def answers(offloaded: OffloadedModel) -> tuple[list[str], dict[str, Any]]:
    offloaded.recorder.reset()
    texts = []
    for text in PROMPTS:
        out = io.StringIO()
        generate(offloaded, prepare_prompt(offloaded, text, chat=False), out)
        texts.append(out.getvalue())
    report = offloaded.report()
    report.table()
    return texts, report.to_json()


@pytest.mark.parametrize("how", ["prompt lookup", "draft model"])
def test_guesses_change_no_text_and_save_calls(three_servers: list[str], how: str) -> None:
    n_tokens, n_servers = 60, 2
    # One open model for both: where experts are placed changes the order of sums.
    with open_model(
        DEMO,
        experts=three_servers[:n_servers],
        device="cpu",
        max_new_tokens=n_tokens,
        draft=DEMO,
        adapt_guesses=False,
        mode="batched",
    ) as offloaded:
        offloaded.model.generation_config.eos_token_id = None  # so that there is much to guess
        draft, offloaded.draft = offloaded.draft, None
        plain, before = answers(offloaded)
        if how == "prompt lookup":
            offloaded.settings = offloaded.settings.model_copy(update={"prompt_lookup": 8})
            offloaded.guess_length = GuessLength(8, adaptive=False)
        else:
            offloaded.draft = draft
        texts, report = answers(offloaded)
    assert texts == plain
    assert "guesses" not in before
    guesses = report["guesses"]
    assert report["completion_tokens"] == guesses["tokens"] == before["completion_tokens"] == n_tokens * len(PROMPTS)
    assert report["prompt_tokens"] == before["prompt_tokens"]
    assert guesses["tokens"] == guesses["passes"] + guesses["right"]
    assert 0 < guesses["right"] <= guesses["guessed"]
    layers = report["model"]["moe_layers"]
    n_calls = sum(phase["calls"] for phase in report["phases"].values())
    # Every pass is one dispatch for each layer and server, however many guesses it verifies.
    assert n_calls <= guesses["passes"] * layers * n_servers
    assert guesses["calls_per_token"] == pytest.approx(n_calls / guesses["tokens"])
    assert guesses["passes"] < 0.7 * guesses["tokens"]


def test_a_draft_model_that_does_not_fit_is_refused(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused = commands.run("moeoffload", "run", str(DEMO), "--prompt", "x", "--draft", str(tmp_path / "empty"))
    assert refused.code == 3
    assert "--draft" in refused.err.splitlines()[-1]
