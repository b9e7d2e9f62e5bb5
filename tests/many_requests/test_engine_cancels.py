"""Requests that are given up, and engines that go on after a failure: nothing is left behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
from command_lines import wait_until
from conftest import DEMO

from moeoffload import open_model
from moeoffload.errors import ServerError
from moeoffload.host.session import OffloadedModel
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.request import FinishReason

from .client import ask, limits, whole

N_CANCELS = 3_000
WAVE = 20


@pytest.fixture(scope="module")
def offloaded(three_servers: list[str]) -> Iterator[OffloadedModel]:
    with open_model(DEMO, experts=three_servers[:1], device="cpu", threads=1) as opened:
        yield opened


def test_thousands_of_cancels_leave_nothing(offloaded: OffloadedModel) -> None:
    generator = random.Random(4)
    with ServingEngine(offloaded, limits(max_running=16, prefill_chunk=64)) as engine:
        created = offloaded.pool_creations
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
        # A slot's views for row counts that are new, or had not come for long; not one more for each request.
        assert offloaded.pool_creations - created < N_CANCELS / 20


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

            def fail(layer: int, error: Exception = error, failing: threading.Event = failing) -> None:
                if not failing.is_set():
                    failing.set()
                    raise error

            with monkeypatch.context() as patch:
                patch.setattr(dispatcher, "on_layer", fail)
                answers = [ask(engine, [n] * 12, 8, ignore_eos=True) for n in (9, 10)]
                assert FinishReason.ERROR in [answer.finish for answer in answers]
            told = [answer.progress[-1].error for answer in answers if answer.finish is FinishReason.ERROR]
            assert all(isinstance(each, ServerError) and str(error) in str(each) for each in told)
            again = whole(engine, [9] * 12, 8)
            assert again.tokens == expected.tokens
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
            patch.setattr(offloaded.dispatcher, "on_layer", fail)
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
