"""The host holds no expert byte and each server only its own experts: measured on a layer of a real geometry."""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from server_processes import PipedProcess, ServerProcess
from synthetic import geometry_config, write_checkpoint

N_EXPERTS = 32
EXPERT_MIB = N_EXPERTS * 3 * 768 * 2048 * 2 / (1 << 20)
SPARE_MIB = 100
"""For frames, workspaces and what libraries make: less than the 144 MiB of experts that each server holds."""


def resident_mib(pid: int, *, peak: bool) -> float:
    """Without pages of files, such as libraries, of which more are touched as a process goes on."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kib = {words[0]: int(words[1]) for words in lines if words[0] in ("VmHWM:", "VmRSS:", "RssFile:")}
    return (kib["VmHWM:" if peak else "VmRSS:"] - kib["RssFile:"]) / 1024


def host(pipe: Connection, checkpoint: Path, experts: list[str]) -> None:
    """In a process of its own: opens the model, and computes a prompt."""
    from moeoffload.host.session import open_model

    torch.set_num_threads(1)
    pipe.send("ready")
    pipe.recv()
    with open_model(checkpoint, experts=experts, device="cpu") as offloaded, torch.inference_mode():
        offloaded.model(torch.randint(5, 1000, (1, 512)), logits_to_keep=1)
        held = [server["resident_bytes"] / (1 << 20) for server in offloaded.report().servers]
        pipe.send((offloaded.checkpoint.dense_bytes / (1 << 20), held))
        pipe.recv()


def test_peak_memory_stays_near_what_each_process_must_hold(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(geometry_config("qwen3-30b-a3b", layers=1, experts=N_EXPERTS, vocab=1000), checkpoint)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ServerProcess(tmp_path)) for _ in range(2)]
        process = PipedProcess(tmp_path / "host.log", host, checkpoint, [server.address for server in servers])
        stack.callback(process.close)
        process.asks()
        pids = [process.pid, *(server.pid for server in servers)]
        before = [resident_mib(pid, peak=False) for pid in pids]
        dense_mib, held_mib = process.asks("go on")
        assert sum(held_mib) == pytest.approx(EXPERT_MIB)
        grown = [resident_mib(pid, peak=True) - was for pid, was in zip(pids, before, strict=True)]
        over = [got - holds for got, holds in zip(grown, [dense_mib, *held_mib], strict=True)]
        assert max(over) < SPARE_MIB, over
