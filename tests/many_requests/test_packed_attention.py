"""Attention of a packed batch: rows see their own keys, in shared calls and by families' own attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import wait_until
from conftest import DEMO
from synthetic import tiny_config, write_checkpoint
from tasks import prompts

from moeoffload import OffloadedModel, open_model
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.model_runner import ModelRunner
from moeoffload.serve.paged_attention import SingleRows
from moeoffload.serve.request import SamplingOptions
from moeoffload.serve.sequence import Sequence, Share

from .client import ask, limits

PAGE = 16
N_PAGES = 64


@pytest.fixture
def shared_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets models on the CPU share calls as those on a GPU do; gives the requests of each shared call."""
    members: list[int] = []
    made, seen = ModelRunner.__init__, SingleRows.seen

    def init(self: Any, *arguments: Any, reuse: bool) -> None:
        made(self, *arguments, reuse=reuse)
        self._shares_calls = True

    def counting(self: Any, *arguments: Any) -> torch.Tensor:
        members.append(len(self.n_keys))
        return seen(self, *arguments)

    monkeypatch.setattr(ModelRunner, "__init__", init)
    monkeypatch.setattr(SingleRows, "seen", counting)
    return members


def served(offloaded: OffloadedModel, texts: list[str]) -> list[list[int]]:
    with ServingEngine(offloaded, limits()) as engine:
        answers = [ask(engine, offloaded.tokenizer(text)["input_ids"]) for text in texts]
        wait_until(lambda: all(answer.over.is_set() for answer in answers), "all answers")
    return [answer.tokens for answer in answers]


def test_answers_are_those_of_requests_alone(three_servers: list[str], shared_calls: list[int]) -> None:
    texts = prompts(24, seed=8)
    with open_model(DEMO, experts=three_servers[:1], model_dtype="f32", dtype="f32", device="cpu") as offloaded:
        together = served(offloaded, texts)
        assert max(shared_calls) > 8
        alone = [served(offloaded, [text])[0] for text in texts]
    assert together == alone


@pytest.fixture(scope="module", params=[None, 24], ids=["all", "window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model in float32 whose layers see all tokens, or the last 24."""
    from transformers import AutoModelForCausalLM

    config = tiny_config("mixtral")
    config.sliding_window = request.param
    path: Path = write_checkpoint(config, tmp_path_factory.mktemp("model") / "model", dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(path).eval()


def decode(runner: ModelRunner, lengths: list[int]) -> torch.Tensor:
    """Logits of one token each behind random prompts of these lengths, whose pages lie between each other's."""
    free = torch.randperm(N_PAGES, generator=torch.manual_seed(5)).tolist()
    sequences = []
    for length in lengths:
        tokens = torch.randint(5, 90, (length,), generator=torch.manual_seed(length)).tolist()
        sequence = Sequence(tokens, SamplingOptions(max_tokens=4, temperature=0), lambda _: None)
        sequence.pages = [free.pop() for _ in range(-(-length // PAGE))]
        sequences.append(sequence)
        if length > 1:
            runner.forward([Share(sequence, tokens[:-1], 0, 0, False)])
    steps = runner.ordered([Share(each, each.tokens[-1:], len(each.tokens) - 1, 0, True) for each in sequences])
    logits = runner.forward(steps)
    return logits[[[step.sequence for step in steps].index(each) for each in sequences]]


@torch.inference_mode()
def test_each_row_sees_its_own_keys_whatever_lies_beside_them(model: Any, shared_calls: list[int]) -> None:
    lengths = [1, 40, 3, 120, 16, 17, 47, 48, 49, 100]
    runner = ModelRunner(model, PAGE, 1 << 20, 8, reuse=False)
    try:
        assert runner.n_pages > N_PAGES
        for pair in runner._store._memory.values():
            for memory in pair:
                memory.fill_(torch.nan)  # what nobody has written
        together = decode(runner, lengths)
        n_layers = model.config.num_hidden_layers
        assert shared_calls == [3, 4, 2] * n_layers  # of 1 page, up to 3, up to 7; the longest is alone
        runner._shares_calls = False
        alone = decode(runner, lengths)
    finally:
        runner.close()
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
