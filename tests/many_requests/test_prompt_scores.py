"""Log probabilities of prompts, and the ways of sampling that are not OpenAI's."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import torch
from conftest import demo_prompt
from transformers import GenerationConfig
from transformers.generation import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from many_requests.client import ask, limits, whole
from many_requests.http_kit import Process
from moeoffload.host.model import recommended_sampling
from moeoffload.host.session import OffloadedModel
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.request import FinishReason, SamplingOptions
from moeoffload.serve.sampling import Sampler


def test_prompts_are_scored_as_transformers_does_in_parts_and_after_a_restart(offloaded: OffloadedModel) -> None:
    prompts = [demo_prompt(200, seed=seed)[0].tolist() for seed in range(3)]
    with torch.inference_mode():
        outputs = [offloaded.model(torch.tensor([prompt])).logits[0] for prompt in prompts]
        expected = [logits.float().log_softmax(-1) for logits in outputs]
    # 28 pages of 16 tokens: not enough for three answers of 60, so that one gives its pages up and starts again.
    with ServingEngine(offloaded, limits(prefill_chunk=64, kv_gib=28 * 16 * 4 * 2 * 64 * 2 / 2**30)) as engine:
        whole(engine, prompts[0], 1)  # what is known of a prompt is not used: its log probabilities are not
        options: dict[str, Any] = {"alternatives": 2, "with_prompt": True, "ignore_eos": True}
        answers = [ask(engine, prompt, 60, **options) for prompt in prompts]
        assert [answer.finish for answer in answers] == [FinishReason.LENGTH] * 3
        only = ask(engine, prompts[0], 0, **options)
        assert only.finish is FinishReason.LENGTH
        assert only.tokens == []
    told = [[each.prompt for each in answer.progress if each.prompt] for answer in (*answers, only)]
    assert [len(each) for each in told] == [1] * 4
    with ServingEngine(offloaded, limits()) as engine:
        whole_prompt = ask(engine, prompts[0], 1, **options)
        assert whole_prompt.finish is FinishReason.LENGTH
        told.append([whole_prompt.progress[0].prompt])
    order = [*range(3), 0, 0]
    for number, (scores,) in zip(order, told, strict=True):
        prompt, logprobs = prompts[number], expected[number]
        assert [choice.token for choice in scores] == prompt
        assert scores[0].logprob is None
        own = torch.tensor([choice.logprob for choice in scores[1:]])
        wanted = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        best = torch.tensor([choice.alternatives[0][1] for choice in scores[1:]])
        off = torch.maximum((own - wanted).abs(), (best - logprobs[:-1].amax(-1)).abs())
        # Computed in parts, bfloat16 rounds otherwise, and a row may go to another expert.
        assert off.max() == 0 if scores is told[-1][0] else off.quantile(0.97) < 0.2


def test_what_lm_eval_sends_is_answered(serve_process: Process) -> None:
    """Its log-likelihood tasks: tokens as prompts, one token at most, and which tokens were the likeliest."""
    prompts = [list(b"reverse hello = olleh"), list(b"reverse abc = xyz")]
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    right, wrong = serve_process.complete(prompts, **body).choices
    sums = []
    for choice, prompt in ((right, prompts[0]), (wrong, prompts[1])):
        told = choice.logprobs
        assert len(told.token_logprobs) == len(told.top_logprobs) == len(told.tokens) == len(prompt) + 1
        assert told.token_logprobs[0] is told.top_logprobs[0] is None
        answer = slice(prompt.index(b"="[0]) + 1, -1)
        pairs = zip(told.token_logprobs[answer], told.top_logprobs[answer], strict=True)
        sums.append((all(one == max(each.values()) for one, each in pairs), sum(told.token_logprobs[answer])))
        assert "".join(told.tokens).removesuffix("<|endoftext|>") == choice.text
        assert told.text_offset == list(range(len(prompt) + 1))
    assert (sums[0][0], sums[1][0]) == (True, False)
    assert sums[0][1] > -1 > sums[1][1]
    text = "reverse hello = olleh"
    parts = [part.choices[0] for part in serve_process.complete(text, stream=True, **body | {"max_tokens": 0})]
    assert "".join(part.text for part in parts) == text
    assert [one for part in parts for one in part.logprobs.token_logprobs] == right.logprobs.token_logprobs[:-1]
    assert parts[-1].finish_reason == "length"
    text = "\u00e9\u20acx\U0001f600 ="
    offsets = [at for at, letter in enumerate(text) for _ in letter.encode()] + [len(text)]
    assert serve_process.complete(text, **body).choices[0].logprobs.text_offset == offsets
    for prefix in (0, 16):
        usage = serve_process.complete("abcdefghijklmnopq", max_tokens=0).usage
        assert usage.prompt_tokens_details.cached_tokens == prefix
    with serve_process.client() as client, pytest.raises(openai.BadRequestError, match="embeddings is not supported"):
        client.embeddings.create(model="demo", input="x")


def test_min_p_and_the_repetition_penalty_are_those_of_transformers() -> None:
    logits, prompt = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 3, [3, 4, 4, 9]
    known = torch.tensor([prompt])
    penalised = RepetitionPenaltyLogitsProcessor(1.7)(known, logits[None].clone())[0]
    greedy = Sampler(SamplingOptions(9, temperature=0, repetition_penalty=1.7), prompt)
    assert greedy.choose(logits).token == int(penalised.argmax())
    kept = MinPLogitsWarper(0.2)(known, logits[None].clone() / 0.8)[0].isfinite().nonzero()[:, 0].tolist()
    sampler = Sampler(SamplingOptions(9, temperature=0.8, min_p=0.2, seed=1))
    assert {sampler.choose(logits).token for _ in range(300)} == set(kept)


@pytest.mark.parametrize("temperature", [1e-20, 1e-38, 1e-60])
def test_the_smallest_temperatures_take_the_likeliest_token(temperature: float) -> None:
    logits = torch.tensor([1.0, 2.0, 9.0, -5.0])
    assert Sampler(SamplingOptions(9, temperature=temperature, seed=1)).choose(logits).token == 2


def test_what_the_publisher_recommends_is_the_default(offloaded: OffloadedModel, monkeypatch: Any) -> None:
    assert recommended_sampling(offloaded.model) == {"temperature": 0.0}
    told = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
    monkeypatch.setattr(offloaded.model, "generation_config", told)
    assert recommended_sampling(offloaded.model) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
