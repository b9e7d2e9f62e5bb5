"""The adaptive spin: pays where waits are short, costs nothing where they are long."""

from __future__ import annotations

import os
from collections.abc import Iterator

import posix_ipc
import pytest

from moeoffload.transport.waiting import AdaptiveSpin


@pytest.fixture
def semaphore() -> Iterator[posix_ipc.Semaphore]:
    semaphore = posix_ipc.Semaphore(None, posix_ipc.O_CREX, initial_value=0)
    semaphore.unlink()
    yield semaphore
    semaphore.close()


@pytest.fixture(autouse=True)
def _several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


def test_short_waits_are_worth_spinning_for_a_little_longer() -> None:
    spin = AdaptiveSpin(200e-6)
    for _ in range(50):
        spin.learn(30e-6)
    assert 30e-6 < spin.budget_s < 100e-6


def test_the_budget_never_exceeds_the_limit() -> None:
    spin = AdaptiveSpin(200e-6)
    for _ in range(50):
        spin.learn(190e-6)
        assert spin.budget_s <= 200e-6


def test_long_waits_are_slept_through_and_forgotten_when_they_end() -> None:
    spin = AdaptiveSpin(200e-6)
    for _ in range(50):
        spin.learn(10.0)
    assert spin.budget_s == 0
    for _ in range(30):
        spin.learn(50e-6)
    assert spin.budget_s > 0


def test_a_single_core_and_a_limit_of_zero_never_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AdaptiveSpin(0).budget_s == 0
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert AdaptiveSpin(200e-6).budget_s == 0


def test_exactly_one_token_is_taken(semaphore: posix_ipc.Semaphore) -> None:
    spin = AdaptiveSpin()
    semaphore.release()
    semaphore.release()
    assert spin.acquire(semaphore, 1)
    assert semaphore.value == 1
    assert spin.acquire(semaphore, 0)
    assert semaphore.value == 0
    assert not spin.acquire(semaphore, 0)
    assert not spin.acquire(semaphore, -1)
    assert not spin.acquire(semaphore, 0.001)
    assert semaphore.value == 0
