"""Devices that a setting names and torch does not have: the reason is said."""

from __future__ import annotations

import logging

import pytest
import torch

from moeoffload import devices
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
