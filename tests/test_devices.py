"""Devices that a setting names and torch does not have: the reason is said."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from moeoffload import devices
from moeoffload.devices import DeviceMemory, device_memory
from moeoffload.errors import SettingError, SystemLimitError


@pytest.mark.parametrize(
    ("driver", "cuda", "failure", "reason"),
    [
        (False, None, None, "no CUDA device"),
        (True, None, None, "a build of torch that uses none"),
        (True, "13.0", RuntimeError("The NVIDIA driver on your system is too old (found version 12040)."), "too old"),
        (True, "13.0", None, "no GPU that this process may use"),
    ],
)
def test_why_there_is_no_gpu_is_said(
    driver: bool,
    cuda: str | None,
    failure: Exception | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def start() -> None:
        if failure is not None:
            raise failure

    monkeypatch.setattr(devices, "has_gpu_driver", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SettingError, match=rf"device cuda:1: this machine has no such GPU; it has .*{reason}"):
        devices.resolve_device("cuda:1", last=True)
    with caplog.at_level(logging.WARNING):
        assert devices.resolve_device("auto", last=True) == torch.device("cpu")
    assert (reason in caplog.text) == driver  # a machine without a GPU needs no warning


def test_a_gpu_without_memory_is_told_apart() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    assert "--memory-gib" in str(SystemLimitError.from_exception(error))


def test_the_memory_of_a_gpu_is_what_torch_has_there_and_that_of_a_cpu_what_is_resident(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second = torch.device("cuda", 1)
    bytes_of = {"memory_allocated": 5 << 30, "memory_reserved": 7 << 30}
    for name, n_bytes in bytes_of.items():
        monkeypatch.setattr(torch.cuda, name, {second: n_bytes}.__getitem__)
    about = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {second: about}.__getitem__)
    assert device_memory(second) == DeviceMemory(5 << 30, 7 << 30, 80 << 30)
    before = device_memory(torch.device("cpu"))
    more = torch.ones(64 << 20, dtype=torch.uint8)
    after = device_memory(torch.device("cpu"))
    assert before.total_bytes > after.reserved_bytes == after.allocated_bytes
    assert after.allocated_bytes - before.allocated_bytes > more.nbytes // 2
