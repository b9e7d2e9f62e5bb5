"""Tokens that are guessed ahead and verified in one pass: fewer dispatches, the same tokens."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import Commands
from conftest import DEMO
from synthetic import write_tiny
from train_head import own_words, train

from moeoffload import open_model
from moeoffload.host.generate import PreparedPrompt, generate, prepare_prompt
from moeoffload.host.session import OffloadedModel
from moeoffload.host.speculative import GuessLength
from moeoffload.serve.engine import ServingEngine

from .client import limits, whole

N_PROMPT, LENGTH = 12, 48


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe", "qwen3_next"])
def drafting(
    request: pytest.FixtureRequest, three_servers: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OffloadedModel, torch.Tensor]]:
    """A model with a trained head, and texts (n, LENGTH) of its own: what it says to their first N_PROMPT tokens."""
    folder = write_tiny(request.param, tmp_path_factory.mktemp(request.param))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    texts = own_words(folder, 32, LENGTH)
    assert train(folder, texts, 80) > 0.5
    with open_model(
        folder, experts=three_servers[:1], device="cpu", mode="batched", draft="own", adapt_guesses=False
    ) as offloaded:
        offloaded.model.generation_config.eos_token_id = None
        yield offloaded, texts[:4]
    torch.set_num_threads(threads)


def answers(offloaded: OffloadedModel, texts: torch.Tensor, **settings: Any) -> tuple[list[list[int]], dict[str, Any]]:
    before = offloaded.settings
    offloaded.settings = before.model_copy(update=settings)
    offloaded.recorder.reset()
    said = []
    for ids in texts[:, None, :N_PROMPT]:
        prompt = PreparedPrompt({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, LENGTH - N_PROMPT)
        said.append(generate(offloaded, prompt, io.StringIO()).tokens.tolist())
    offloaded.settings = before
    return said, offloaded.report().to_json()


def test_an_own_head_changes_no_token_and_saves_calls(drafting: tuple[OffloadedModel, torch.Tensor]) -> None:
    offloaded, texts = drafting
    sampled = {"temperature": 0.7, "seed": 5}
    head, offloaded.draft = offloaded.draft, None
    plain, before = answers(offloaded, texts)
    drawn, _ = answers(offloaded, texts, **sampled)
    offloaded.draft = head
    guessed, report = answers(offloaded, texts)
    assert guessed == plain
    assert answers(offloaded, texts, **sampled)[0] == drawn != plain
    guesses = report["guesses"]
    assert guesses["acceptance"] > 0.15
    assert guesses["passes"] < 0.75 * guesses["tokens"]
    calls, calls_before = (sum(phase["calls"] for phase in each["phases"].values()) for each in (report, before))
    # Every pass is one dispatch for each layer; the head itself asks no server.
    assert calls == guesses["passes"] * report["model"]["moe_layers"] < calls_before


def test_requests_with_an_own_head_get_the_same_tokens_in_fewer_steps(
    drafting: tuple[OffloadedModel, torch.Tensor],
) -> None:
    offloaded, texts = drafting
    prompts = [text[:N_PROMPT].tolist() for text in texts]
    head, offloaded.draft = offloaded.draft, None
    without = offloaded.settings.model_copy(update={"draft": None})
    offloaded.settings, before = without, offloaded.settings
    with ServingEngine(offloaded, limits()) as engine:
        plain = [whole(engine, prompt, LENGTH - N_PROMPT).tokens for prompt in prompts]
        steps = engine.stats.steps.steps
    offloaded.settings, offloaded.draft = before, head
    with ServingEngine(offloaded, limits()) as engine:
        guessed = [whole(engine, prompt, LENGTH - N_PROMPT).tokens for prompt in prompts]
        stats = engine.stats
        report = offloaded.report()
    assert guessed == plain
    assert report.guesses is not None
    assert (report.guesses["guessed"], report.guesses["right"]) == (stats.tokens.guessed, stats.tokens.guessed_right)
    assert 0 < stats.tokens.guessed_right < stats.tokens.guessed
    assert stats.steps.steps < 0.8 * steps


def test_heads_and_draft_models_that_are_none_are_refused_by_what_is_not_there(
    commands: Commands, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for draft, words in (("own", "neither model.layers.4.* nor mtp.*"), (tmp_path / "empty", "--draft")):
        refused = commands.run("moeoffload", "run", DEMO, "--prompt", "x", "--draft", draft)
        assert refused.code == 3
        assert words in refused.err.splitlines()[-1]


@pytest.mark.parametrize("by_model", [False, True])
def test_layers_of_linear_attention_take_wrong_guesses_back(
    by_model: bool, three_servers: list[str], tmp_path: Path
) -> None:
    """Guesses by lookup, and of a draft model that has such layers too and is not the model."""
    folder, other = write_tiny("qwen3_5_moe", tmp_path / "model"), write_tiny("qwen3_next", tmp_path / "draft")
    ids = torch.tensor([[7, 8, 9, 7, 8, 9, 7, 8]] * 2)
    guessing: dict[str, Any] = {"draft": str(other)} if by_model else {"prompt_lookup": 3}
    with open_model(
        folder, experts=three_servers[:1], device="cpu", model_dtype="f32", adapt_guesses=False, **guessing
    ) as offloaded:
        offloaded.model.generation_config.eos_token_id = None
        plain = offloaded.model.generate(ids[:1], max_new_tokens=LENGTH, do_sample=False)[0, ids.shape[1] :].tolist()
        prompt = PreparedPrompt({"input_ids": ids[:1], "attention_mask": torch.ones_like(ids[:1])}, LENGTH)
        assert generate(offloaded, prompt, io.StringIO()).tokens.tolist() == plain
        guesses = offloaded.report().to_json()["guesses"]
    assert 0 < guesses["guessed"] > guesses["right"]


@pytest.mark.parametrize(("wrong_s", "best"), [(0.1, 4), (9.0, 0)])
def test_guessing_goes_on_only_where_it_pays(wrong_s: float, best: int) -> None:
    """A pass takes a second, and a guess so much more; of four guesses half are right."""
    lengths = GuessLength(4, adaptive=True)

    def run(n_passes: int, guess_s: float) -> list[int]:
        chosen = []
        for _ in range(n_passes):
            chosen.append(lengths.choose())
            lengths.count(1 + chosen[-1] // 2, 1 + guess_s * chosen[-1])
        return chosen

    chosen = run(300, wrong_s)
    assert chosen.count(best) > 0.85 * len(chosen)
    # What it costs changes; it is noticed by trying again now and then.
    other = 4 - best
    assert run(9000, 9.1 - wrong_s)[-100:].count(other) > 80


PROMPTS = ["sort abcabca =", "count z zazbzcz =", "add 111 111 =", "reverse abababa ="]
"""Their answers, and what the model babbles after them, repeat parts of them."""


def texts_of(offloaded: OffloadedModel) -> tuple[list[str], dict[str, Any]]:
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
    options: dict[str, Any] = {"max_new_tokens": n_tokens, "draft": DEMO, "adapt_guesses": False, "mode": "batched"}
    with open_model(DEMO, experts=three_servers[:n_servers], device="cpu", **options) as offloaded:
        offloaded.model.generation_config.eos_token_id = None  # so that there is much to guess
        draft, offloaded.draft = offloaded.draft, None
        plain, before = texts_of(offloaded)
        if how == "prompt lookup":
            offloaded.settings = offloaded.settings.model_copy(update={"prompt_lookup": 8})
            offloaded.guess_length = GuessLength(8, adaptive=False)
        else:
            offloaded.draft = draft
        texts, report = texts_of(offloaded)
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
