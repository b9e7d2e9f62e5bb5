"""Weights that go to a GPU through two buffers: which bytes arrive, when a buffer is used again. The CPU stands in."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEMO
from synthetic import write_tiny

from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.copy_buffers import CopyBuffers, Pair
from moeoffload.checkpoint.tensors import StoredTensor, TensorReader
from moeoffload.errors import ModelError
from moeoffload.page_locked import PageLocked

from .quantised import CASES, Case, write

CPU = torch.device("cpu")


class Driver:
    """Page-locks nothing, or fails to."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.locked = error, list[int]()

    def cudaHostRegister(self, start: int, n_bytes: int, flags: int) -> int:
        self.locked += [] if self.error else [n_bytes]
        return self.error

    def cudaHostUnregister(self, start: int) -> int:
        self.locked.pop()
        return 0


class Late(CopyBuffers):
    """Copies as late as a device may: when they are waited for."""

    def __init__(self, n_bytes: int, driver: Driver) -> None:
        super().__init__(n_bytes)
        self.driver, self.open, self.most_open, self.most_locked = driver, 0, 0, 0

    def serve(self, device: torch.device) -> bool:
        return True

    def _lock(self, memory: memoryview, device: torch.device) -> PageLocked:
        return PageLocked([memory], device, self.driver)

    def _begin(self, device: torch.device) -> None:
        self.most_locked = max(self.most_locked, sum(self.driver.locked))

    def _start(self, pairs: Iterable[Pair], device: torch.device) -> Callable[[], object]:
        pairs = list(pairs)
        self.open += 1
        self.most_open = max(self.most_open, self.open)

        def wait() -> None:
            for to, source in pairs:
                to.copy_(source)
            self.open -= 1

        return wait


def tensors(module: Any) -> dict[str, torch.Tensor]:
    """All bytes of the weights."""
    found = dict(module.named_parameters())
    for name in ("gate_up_proj", "down_proj"):
        parts = getattr(module, name)
        for number, part in enumerate(parts if isinstance(parts, tuple) else ()):
            found[f"{name}.{number}"] = part.data
            if part.scales is not None:
                found[f"{name}.{number}.scales"] = part.scales
    return found


def same_with_buffers(checkpoint: Checkpoint, n_bytes: int) -> Late:
    """Builds all layers with and without buffers of ``n_bytes``; the bytes are the same."""
    experts = [*range(1, checkpoint.layers[0].n_experts), 0]
    with Late(n_bytes, Driver()) as buffers:
        for layer in checkpoint.layers:
            through = tensors(checkpoint.build_experts(layer.index, experts, CPU, buffers=buffers))
            assert buffers.open == 0, "experts are there when they are handed out"
            for name, values in tensors(checkpoint.build_experts(layer.index, experts, CPU)).items():
                assert torch.equal(through[name], values), name
    assert buffers.driver.locked == []
    return buffers


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_experts_are_those_that_are_read_in_place(case: Case, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(case, tmp_path))
    same_with_buffers(checkpoint, 3 * checkpoint.layers[0].expert_bytes)


def test_one_buffer_is_filled_while_the_other_is_copied() -> None:
    checkpoint = Checkpoint.open(DEMO)
    n_bytes = 5 * checkpoint.layers[0].expert_bytes // 2
    buffers = same_with_buffers(checkpoint, n_bytes)
    assert buffers.most_open == 2
    assert 0 <= buffers.most_locked - 2 * n_bytes < 2 * mmap.PAGESIZE, "all layers went through the same two"


def test_an_expert_larger_than_a_buffer_makes_it_larger() -> None:
    assert same_with_buffers(Checkpoint.open(DEMO), 1).most_locked > 2


def test_experts_that_are_converted_need_no_buffers(tmp_path: Path) -> None:
    assert same_with_buffers(Checkpoint.open(write_tiny("gpt_oss", tmp_path)), 1 << 20).most_locked == 0


def test_memory_that_cannot_be_locked_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint, driver = Checkpoint.open(DEMO), Driver(error=2)
    with caplog.at_level(logging.INFO), Late(1 << 20, driver) as buffers:
        for layer in range(3):
            through = tensors(checkpoint.build_experts(layer, range(32), CPU, buffers=buffers))
            for name, values in tensors(checkpoint.build_experts(layer, range(32), CPU)).items():
                assert torch.equal(through[name], values), name
    told = [record.getMessage() for record in caplog.records]
    assert told == ["2097152 bytes are not page-locked for CUDA (error 2)"]


def test_a_copy_is_waited_for_when_reading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(DEMO)
    with Late(2 * checkpoint.layers[0].expert_bytes, Driver()) as buffers:
        read = TensorReader.read_part

        def fail(self: TensorReader, tensor: StoredTensor, *rest: Any) -> torch.Tensor:
            if ".experts.20." in tensor.name:
                raise ModelError("cut short")
            return read(self, tensor, *rest)

        monkeypatch.setattr(TensorReader, "read_part", fail)
        with pytest.raises(ModelError, match="cut short"):
            checkpoint.build_experts(0, range(32), CPU, buffers=buffers)
        assert (buffers.open, buffers.most_open) == (0, 2)
