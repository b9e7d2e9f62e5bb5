"""Requests that are computed together get the answers they get alone; those given up leave nothing behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from command_lines import wait_until
from conftest import DEMO, demo_prompt
from tasks import prompts

from moeoffload import OffloadedModel, open_model
from moeoffload.errors import BusyError, PromptError, ServerError
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.request import FinishReason

from .client import Answer, ask, limits, whole


@pytest.fixture
def engine(offloaded: OffloadedModel) -> Iterator[ServingEngine]:
    with ServingEngine(offloaded, limits()) as running:
        yield running


def held_out(offloaded: OffloadedModel, n: int) -> list[list[int]]:
    return [offloaded.tokenizer(text)["input_ids"] for text in prompts(n, seed=5)]


def alone(offloaded: OffloadedModel, prompt: list[int]) -> Any:
    """At most 24 tokens that transformers generates."""
    with torch.inference_mode():
        out = offloaded.model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def test_32_requests_at_once_get_the_tokens_they_get_alone(offloaded: OffloadedModel) -> None:
    wanted = held_out(offloaded, 32)
    expected = [alone(offloaded, prompt) for prompt in wanted]
    with ServingEngine(offloaded, limits()) as engine:
        answers = [ask(engine, prompt) for prompt in wanted]
        assert {answer.finish for answer in answers} == {FinishReason.STOP}
    assert [answer.tokens for answer in answers] == expected


def test_long_prompts_are_cut_and_do_not_keep_others_waiting(offloaded: OffloadedModel) -> None:
    generator = random.Random(1)
    long = [[generator.randrange(5, 60) for _ in range(900)] for _ in range(2)]
    short = held_out(offloaded, 2)
    with ServingEngine(offloaded, limits(prefill_chunk=128, max_running=8)) as engine:
        slow = [ask(engine, prompt, 4, ignore_eos=True) for prompt in long]
        quick = [ask(engine, prompt) for prompt in short]
        done_first = [answer.finish for answer in quick]
        assert not any(answer.over.is_set() for answer in slow), "short prompts share the steps of long ones"
        assert done_first == [FinishReason.STOP] * 2
        assert [answer.finish for answer in slow] == [FinishReason.LENGTH] * 2
        assert engine.stats.step_rows.counts[-1] == 0
    assert [answer.tokens for answer in quick] == [alone(offloaded, prompt) for prompt in short]
    assert [len(answer.tokens) for answer in slow] == [4, 4]


def test_the_second_turn_of_a_conversation_computes_what_is_new_only(offloaded: OffloadedModel) -> None:
    turns = demo_prompt(2100, seed=2)[0].tolist()
    first = turns[:2000]
    with ServingEngine(offloaded, limits()) as engine:
        answer = whole(engine, first, 16)
        rows = [rows_sent(offloaded)]
        second = ask(engine, [*first, *answer.tokens, *turns[2050:]])
        assert second.finish is FinishReason.STOP
        rows.append(rows_sent(offloaded))
    assert second.progress[-1].reused_tokens >= 2000
    assert rows[1] - rows[0] <= 0.05 * rows[0]
    with ServingEngine(offloaded, limits(prefix_reuse=False)) as engine:
        computed = ask(engine, [*first, *answer.tokens, *turns[2050:]])
        assert computed.finish is FinishReason.STOP
    assert computed.progress[-1].reused_tokens == 0
    assert computed.tokens == second.tokens


def rows_sent(offloaded: OffloadedModel) -> int:
    return sum(server.rows for phase in offloaded.recorder.phases.values() for server in phase.servers)


def test_a_seed_gives_the_same_tokens_in_any_company(offloaded: OffloadedModel, engine: ServingEngine) -> None:
    # So short that its rows and those of the company are few: kernels for few rows do not round by their number.
    prompt = held_out(offloaded, 1)[0][:5]
    by_itself = whole(engine, prompt, temperature=8.0, seed=7)
    others = [ask(engine, prompt, 400, temperature=8.0, seed=seed, ignore_eos=True) for seed in range(7)]
    wait_until(lambda: all(other.tokens for other in others), "the company's first tokens")
    assert whole(engine, prompt, temperature=8.0, seed=7).tokens == by_itself.tokens
    assert not any(other.over.is_set() for other in others)
    assert len({tuple(other.tokens[:24]) for other in others}) > 1


def test_log_probabilities_are_the_models(offloaded: OffloadedModel) -> None:
    prompt = held_out(offloaded, 1)[0]
    with ServingEngine(offloaded, limits()) as engine:
        answer = whole(engine, prompt, 3, alternatives=4)
    with torch.inference_mode():
        logits = offloaded.model(torch.tensor([[*prompt, *answer.tokens[:-1]]])).logits[0, -3:].float()
    for row, progress in zip(logits.log_softmax(-1), answer.progress, strict=True):
        assert progress.choice is not None
        best = row.topk(4)
        assert progress.choice.logprob == pytest.approx(float(row[progress.choice.token]), abs=0.1)
        assert progress.choice.alternatives[0][0] == int(best.indices[0])
        assert [value for _, value in progress.choice.alternatives] == pytest.approx(best.values.tolist(), abs=0.1)


def test_a_bias_and_penalties_change_the_choice(offloaded: OffloadedModel, engine: ServingEngine) -> None:
    prompt = held_out(offloaded, 1)[0]
    assert whole(engine, prompt, 4, bias={9: 100.0}).tokens == [9] * 4
    both = {9: 100.0, 10: 100.0}
    assert len(set(whole(engine, prompt, 2, bias=both).tokens)) == 1
    assert set(whole(engine, prompt, 24, bias=both, frequency_penalty=2.0).tokens) == {9, 10}


def test_what_cannot_be_taken_is_refused(offloaded: OffloadedModel) -> None:
    with ServingEngine(offloaded, limits(max_running=2, max_waiting=3)) as engine:
        with pytest.raises(PromptError, match="empty"):
            ask(engine, [])
        with pytest.raises(PromptError, match="context holds"):
            ask(engine, [5] * engine.context_tokens)
        with pytest.raises(PromptError, match="answer may have"):
            ask(engine, [5] * 10, engine.context_tokens)
        for options in ({"prompt": [5, 10**6]}, {"prompt": [-1]}, {"prompt": [5], "bias": {10**6: 1.0}}):
            with pytest.raises(PromptError, match="none of the model's"):
                ask(engine, **options)  # type: ignore[arg-type]
        taken: list[Answer] = []
        waits: list[float] = []
        for _ in range(256):
            try:
                taken.append(ask(engine, [5, 6, 7], 60, ignore_eos=True))
            except BusyError as error:
                waits.append(error.retry_after_s)
        assert min(waits) >= 1
        assert 5 <= len(taken) < 256
        assert {answer.finish for answer in taken} == {FinishReason.LENGTH}
        assert engine.stats.requests.rejected == len(waits) == 256 - len(taken)
        assert engine.drain(10)
        assert not engine.is_ready
        with pytest.raises(ServerError, match="shutting down"):
            ask(engine, [5])


def test_more_than_the_cache_holds_is_computed_all_the_same(
    offloaded: OffloadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that run out of room for keys and values are put back and start again; nobody notices."""
    wanted = held_out(offloaded, 12)
    with ServingEngine(offloaded, limits(kv_gib=0.0004, prefix_reuse=False)) as engine:
        assert engine.stats.cache.total_tokens < 12 * 60
        assert "kv-gib holds no more" in caplog.text
        answers = [ask(engine, prompt, 60, ignore_eos=True) for prompt in wanted]
        assert {answer.finish for answer in answers} == {FinishReason.LENGTH}
    with ServingEngine(offloaded, limits()) as engine:
        roomy = [ask(engine, prompt, 60, ignore_eos=True) for prompt in wanted]
        assert {answer.finish for answer in roomy} == {FinishReason.LENGTH}
    # Behind its end a model babbles, which a rounding can change; when requests were put back depends on the moment.
    (eos,) = {token for token in [offloaded.model.generation_config.eos_token_id] if isinstance(token, int)}
    assert [until(eos, answer.tokens) for answer in answers] == [until(eos, answer.tokens) for answer in roomy]


def until(last: int, tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(last)]


@pytest.mark.parametrize("how", [{"prompt_lookup": 7}, {"draft": DEMO, "draft_tokens": 7}], ids=str)
def test_guesses_change_nothing_but_the_number_of_steps(three_servers: list[str], how: dict[str, Any]) -> None:
    repetitive = [[7, 8, 9, 10] * 6, [20, 21, 22] * 5]
    with open_model(DEMO, experts=three_servers[:1], device="cpu", threads=1, adapt_guesses=False, **how) as opened:
        guessing = opened.settings
        opened.settings = guessing.model_copy(update={"prompt_lookup": 0, "draft": None})
        with ServingEngine(opened, limits()) as engine:
            plain = [whole(engine, prompt, 100) for prompt in repetitive]
            steps = engine.stats.steps.steps
        opened.settings = guessing
        with ServingEngine(opened, limits()) as engine:
            guessed = [whole(engine, prompt, 100) for prompt in repetitive]
            stats = engine.stats
            # The next turn finds in the cache what the guesses of this one have left there: only what was right.
            turn = whole(engine, [*repetitive[0], *plain[0].tokens], 40)
        with ServingEngine(opened, limits(prefix_reuse=False)) as engine:
            fresh = whole(engine, [*repetitive[0], *plain[0].tokens], 40)
    assert [answer.tokens for answer in guessed] == [answer.tokens for answer in plain]
    assert 0 < stats.tokens.guessed_right <= stats.tokens.guessed  # its own draft model may be right always
    assert stats.steps.steps < 0.8 * steps
    assert turn.progress[-1].reused_tokens >= 96
    assert turn.tokens[:8] == fresh.tokens[:8]


N_CANCELS = 3_000
WAVE = 20


def test_thousands_of_cancels_leave_nothing(offloaded: OffloadedModel) -> None:
    generator = random.Random(4)
    with ServingEngine(offloaded, limits(max_running=16, prefill_chunk=64)) as engine:
        finishes: list[FinishReason | None] = []
        n_begun = 0
        for _ in range(N_CANCELS // WAVE):
            answers = []
            for _ in range(WAVE):
                prompt = [generator.randrange(5, 60) for _ in range(generator.randrange(1, 40))]
                answers.append(ask(engine, prompt, generator.randrange(1, 12), ignore_eos=True))
                if generator.random() < 0.2:
                    answers[-1].cancel()
            target = engine.stats.steps.steps + generator.randrange(4)
            while engine.stats.steps.steps < target and not all(answer.over.is_set() for answer in answers):
                time.sleep(0.0005)
            for answer in generator.sample(answers, WAVE):
                answer.cancel()
                answer.cancel()
            finishes += [answer.finish for answer in answers]
            n_begun += sum(bool(answer.tokens) and answer.finish is FinishReason.CANCELLED for answer in answers)
        assert set(finishes) == {FinishReason.CANCELLED, FinishReason.LENGTH}
        assert len(finishes) == N_CANCELS
        assert n_begun > N_CANCELS / 10, "many were cancelled in the middle of their answers"
        assert finishes.count(FinishReason.CANCELLED) > N_CANCELS / 2
        whole(engine, [7] * 20, 3)
        assert engine.drain(10)
        wait_until(lambda: engine.stats.cache.used_tokens == 0, "the room of all")
        n_stale = sum(link.channel.n_stale for link in offloaded.links)
        assert n_stale == 0, "a step is finished before its requests are dropped"


def test_a_cancel_is_answered_within_a_step_and_its_room_is_free(offloaded: OffloadedModel) -> None:
    with ServingEngine(offloaded, limits(max_running=1, max_waiting=8)) as engine:
        long = ask(engine, [7] * 10, 5000, ignore_eos=True)
        second = ask(engine, [8] * 10, 2, ignore_eos=True)
        while not long.tokens:
            assert not long.over.wait(0.01)
        assert not second.over.is_set()
        steps = engine.stats.steps.steps
        long.cancel()
        assert long.finish is FinishReason.CANCELLED
        assert engine.stats.steps.steps <= steps + 2
        assert second.finish is FinishReason.LENGTH


def test_a_failed_step_fails_its_requests_and_no_others(
    offloaded: OffloadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServingEngine(offloaded, limits()) as engine:
        expected = whole(engine, [9] * 12, 8)
        dispatcher = offloaded.dispatcher
        for error in (ServerError("the server is gone"), ZeroDivisionError("unforeseen")):
            failing = threading.Event()

            def fail(*_: object, error: Exception = error, failing: threading.Event = failing) -> None:
                if not failing.is_set():
                    failing.set()
                    raise error

            with monkeypatch.context() as patch:
                patch.setattr(dispatcher, "on_routes", fail)
                answers = [ask(engine, [n] * 12, 8, ignore_eos=True) for n in (9, 10)]
                assert FinishReason.ERROR in [answer.finish for answer in answers]
            told = [answer.progress[-1].error for answer in answers if answer.finish is FinishReason.ERROR]
            assert all(isinstance(each, ServerError) and str(error) in str(each) for each in told)
            assert whole(engine, [9] * 12, 8).tokens == expected.tokens
        assert engine.is_ready


def test_a_failure_that_nothing_catches_ends_all_requests_and_is_seen(
    offloaded: OffloadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ServingEngine(offloaded, limits(max_running=1)) as engine:
        failing = threading.Event()

        def fail(*_: object) -> None:
            if failing.wait():
                raise SystemExit("unforeseen")

        with monkeypatch.context() as patch:
            patch.setattr(offloaded.dispatcher, "on_routes", fail)
            running, waiting = ask(engine, [9] * 12, 8), ask(engine, [10] * 12, 8)
            failing.set()
            assert {running.finish, waiting.finish} == {FinishReason.ERROR}
        assert isinstance(running.progress[-1].error, ServerError)
        assert isinstance(engine.failure, SystemExit)
        assert not engine.is_ready
        assert "the engine has failed" in caplog.text
        counts = engine.stats.requests
        assert (counts.running, counts.waiting, counts.failed, engine.stats.cache.used_tokens) == (0, 0, 2, 0)
        assert engine.drain(1)
        with pytest.raises(ServerError, match="has failed: unforeseen"):
            ask(engine, [9] * 12, 8)
