"""Steps in two halves: the same logits, whatever fails, and a step that a server's loss interrupts counts nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import tasks
import torch
from command_lines import wait_until
from conftest import DEMO, StartServer, demo_prompt
from models import n_tokens

from moeoffload import OffloadedModel, open_model
from moeoffload.errors import DeadlineError, ServerError
from moeoffload.host.recorder import DECODE, PREFILL, Recorder
from moeoffload.host.turns import Turns
from moeoffload.serve.block_manager import BlockManager
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.halves import Halves, cut
from moeoffload.serve.model_runner import ModelRunner
from moeoffload.serve.request import FinishReason, SamplingOptions
from moeoffload.serve.sequence import Sequence, Share

from .client import ask, limits, whole

SOON_S = 20.0


def share(n_rows: int, past: int = 0, *, has_token: bool = True) -> Share:
    tokens = demo_prompt(past + n_rows, seed=n_rows)[0].tolist()
    sequence = Sequence(tokens, SamplingOptions(max_tokens=4, temperature=0), lambda progress: None)
    return Share(sequence, tokens[past:], past, 0, has_token)


@pytest.mark.parametrize(
    ("rows", "halves"),
    [
        ([1], []),
        ([63], []),
        ([], []),
        ([1, 1], [[1], [1]]),
        ([1, 1, 1], [[1], [1, 1]]),
        ([64], [[32], [32]]),
        ([301], [[150], [151]]),
        ([5, 5, 100, 4], [[5, 5, 47], [53, 4]]),
        ([100, 100], [[100], [100]]),
        ([1, 40], []),
        ([40, 1], []),
        ([10, 40], []),
        ([14, 40], [[14], [40]]),
        ([40, 20], [[40], [20]]),
        ([500, 1, 1], [[251], [249, 1, 1]]),
    ],
    ids=str,
)
def test_where_a_step_is_cut(rows: list[int], halves: list[list[int]]) -> None:
    shares = [share(n) for n in rows]
    parts = cut(shares)
    assert [[len(each.tokens) for each in part] for part in parts] == halves
    together = [each for part in parts for each in part]
    if parts:
        assert [token for each in together for token in each.tokens] == [t for each in shares for t in each.tokens]
        assert sum(each.n_logits for each in together) == len(shares)
    for before, after in pairwise(together):
        if before.sequence is after.sequence:
            assert (before.end, before.has_token) == (after.past, False)


@contextmanager
def runner_of(offloaded: OffloadedModel) -> Iterator[tuple[ModelRunner, Halves]]:
    runner = ModelRunner(offloaded.model, 16, 1 << 26, 8, reuse=False)
    halves = Halves(offloaded, runner)
    try:
        with torch.inference_mode():
            yield runner, halves
    finally:
        runner.close()


def steps(runner: ModelRunner) -> list[list[Share]]:
    """A step of prompts and one of answers; each sequence has its pages."""
    blocks = BlockManager(runner.n_pages, 16, reuse=False)
    prompts = [share(n, has_token=n != 90) for n in (20, 90, 33, 200)]
    answers = [Share(each.sequence, [7], len(each.sequence.tokens), 0, has_token=True) for each in prompts]
    for each in prompts:
        assert blocks.grow(each.sequence, len(each.sequence.tokens) + 1)
    return [prompts, answers]


def check_logits(offloaded: OffloadedModel) -> None:
    """Halves have the logits of the same parts one after the other."""
    with runner_of(offloaded) as (runner, halves):
        found, expected = [], []
        for shares in steps(runner):
            found.append(halves.forward(shares, whole=False))
        for shares in steps(runner):
            expected.append(torch.cat([runner.forward(part) for part in cut(shares)]))
        assert [len(logits) for logits in found] == [3, 4]
        assert all(map(torch.equal, found, expected))


def test_halves_have_the_logits_of_the_same_parts_one_after_the_other(offloaded: OffloadedModel) -> None:
    check_logits(offloaded)


def test_halves_need_no_second_slot(three_servers: list[str]) -> None:
    """The second one waits for the first one's, which must come back without the turn."""
    with open_model(DEMO, experts=three_servers[:2], slots=1, device="cpu", dispatch_timeout_s=SOON_S) as offloaded:
        check_logits(offloaded)


def test_figures_of_a_step_in_halves_are_those_of_one_pass(offloaded: OffloadedModel) -> None:
    with runner_of(offloaded) as (runner, halves):
        offloaded.recorder.reset()
        for phase, shares in zip((PREFILL, DECODE), steps(runner), strict=True):
            offloaded.recorder.own.next_phase = phase
            halves.forward(shares, whole=False)
        prefill, decode = (offloaded.recorder.phases[phase] for phase in (PREFILL, DECODE))
    assert (prefill.forwards, prefill.tokens) == (1, 343)
    assert (decode.forwards, decode.tokens) == (1, 4)
    for counters in (prefill, decode):
        assert counters.thread_s > 0
        assert 0.9 <= counters.accounted <= 1.01


@pytest.mark.parametrize("fails", [0, 1])
def test_a_half_stops_soon_after_the_other_one_failed(offloaded: OffloadedModel, fails: int) -> None:
    layers: list[list[int]] = [[], []]

    def fail(layer: int, ids: torch.Tensor) -> None:
        half = int(threading.current_thread() is not threading.main_thread())
        layers[half].append(layer)
        if half == fails and layer == 1:
            raise ServerError("gone")

    with runner_of(offloaded) as (runner, halves):
        prompts, _ = steps(runner)
        expected = halves.forward(prompts, whole=False)
        offloaded.dispatcher.on_routes = fail
        try:
            with pytest.raises(ServerError, match="gone"):
                halves.forward(prompts, whole=False)
        finally:
            offloaded.dispatcher.on_routes = None
        assert layers[fails] == [0, 1]
        assert max(layers[1 - fails]) <= 1
        assert torch.equal(halves.forward(prompts, whole=False), expected)


def test_a_half_does_not_wait_for_the_other_one_for_ever() -> None:
    turns = Turns(Recorder(0, 0, torch.device("cpu")), 0.1)
    ends = threading.Event()
    threading.Timer(0.5, ends.set).start()
    with pytest.raises(DeadlineError, match="half of a pass waited"):
        turns.run(PREFILL, (ends.wait, lambda: False), lambda seconds: None)
    assert turns.run(PREFILL, (lambda: 1, lambda: 2), lambda seconds: None) == (1, 2)
    turns.close()


def test_requests_get_their_tokens_although_a_server_goes(start_server: StartServer) -> None:
    stays, goes = start_server(), start_server()
    addresses = [stays.address, goes.address]
    with open_model(DEMO, experts=addresses, device="cpu", replicas=2) as found:
        prompts = [demo_prompt(150, seed=seed)[0].tolist() for seed in range(4)]
        with ServingEngine(found, limits()) as engine:
            before = [ask(engine, prompt, 30, ignore_eos=True) for prompt in prompts]
            assert {answer.finish for answer in before} == {FinishReason.LENGTH}
            after = [ask(engine, prompt, 30, ignore_eos=True) for prompt in prompts]
            threading.Timer(0.05, goes.process.kill).start()
            assert {answer.finish for answer in after} == {FinishReason.LENGTH}
            assert found.recovery()["lost"], "the server went while they were computed"
    assert [answer.tokens for answer in after] == [answer.tokens for answer in before]


def test_answers_with_guesses_after_prompts_in_halves_are_those_without(three_servers: list[str]) -> None:
    """Steps that verify guesses, of which some are wrong, are whole."""
    options: dict[str, Any] = {"model_dtype": "f32", "dtype": "f32", "device": "cpu", "adapt_guesses": False}
    with open_model(DEMO, experts=three_servers[:2], prompt_lookup=4, **options) as found:
        found.model.generation_config.eos_token_id = None
        lines = tasks.long_prompt(150, seed=1).rpartition("\n")[0]
        texts = [f"{lines}\n{question}" for question in ("sort abcabca =", "reverse abababa =")]
        prompts = [found.tokenizer(text)["input_ids"] for text in texts]
        expected = [n_tokens(found.model, torch.tensor([prompt]), 24) for prompt in prompts]
        with ServingEngine(found, limits()) as engine:
            answers = [ask(engine, prompt, 24, ignore_eos=True) for prompt in prompts]
            assert {answer.finish for answer in answers} == {FinishReason.LENGTH}
            assert found.recorder.phases[PREFILL].thread_s > 0, "prompts were computed in halves"
            tokens = engine.stats.tokens
            assert 0 < tokens.guessed_right < tokens.guessed
    assert [answer.tokens for answer in answers] == expected


def test_requests_whose_halves_both_fail_end_and_the_next_ones_do_not(start_server: StartServer) -> None:
    """The only server goes while both halves wait for it."""
    server = start_server()
    prompts = [demo_prompt(n, seed=n)[0].tolist() for n in (20, 150, 170)]
    waits, held, halves = threading.Event(), threading.Event(), list[int]()

    def strike(layer: int, ids: torch.Tensor) -> None:
        if len(ids) < len(prompts[0]):  # the first request's answer, in whose next step both others are
            waits.set()
            assert held.wait(SOON_S)
        elif len(ids) > len(prompts[0]):
            halves.append(threading.get_ident())
            server.process.send_signal(signal.SIGSTOP if len(halves) == 1 else signal.SIGKILL)

    with (
        open_model(DEMO, experts=[server.address], device="cpu", fallback_gib=0) as found,
        ServingEngine(found, limits()) as engine,
    ):
        expected = whole(engine, prompts[1], 8)
        found.dispatcher.on_routes = strike
        answers = [ask(engine, prompts[0], 1000, ignore_eos=True)]
        assert waits.wait(SOON_S)
        answers += [ask(engine, prompt, 8, ignore_eos=True) for prompt in prompts[1:]]
        held.set()
        assert {answer.finish for answer in answers} == {FinishReason.ERROR}
        told = [answer.progress[-1].error for answer in answers]
        assert all(isinstance(error, ServerError) and server.address in str(error) for error in told), told
        assert len(set(halves)) == len(halves) == 2
        found.dispatcher.on_routes = None
        server.start()
        wait_until(lambda: ask(engine, prompts[1], 8).finish is not FinishReason.ERROR, "an answer")
        assert whole(engine, prompts[1], 8).tokens == expected.tokens


def test_without_a_pipeline_steps_are_whole(three_servers: list[str]) -> None:
    with open_model(DEMO, experts=three_servers[:1], device="cpu", pipeline="off") as found:
        with runner_of(found) as (runner, halves):
            found.recorder.reset()
            halves.forward(steps(runner)[0], whole=False)
        assert found.recorder.phases[PREFILL].thread_s == 0
