"""The host holds no expert byte, each server only its own experts, of which it reads no others' bytes: measured.

Weights are in huge pages where the system has them, and of the right shape, dtype and place everywhere.
"""

from __future__ import annotations

import contextlib
import re
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from server_processes import PipedProcess, ServerProcess
from synthetic import Layout, geometry_config, write_checkpoint

from moeoffload import huge_pages
from moeoffload.checkpoint.tensors import TensorIndex, TensorReader
from moeoffload.huge_pages import empty_weights

MIB = 1 << 20
N_EXPERTS = 32
EXPERTS_BYTES = N_EXPERTS * 3 * 768 * 2048 * 2
SPARE_MIB = 100
"""For frames, workspaces and what libraries make: less than the 144 MiB of experts that each server holds."""


@pytest.fixture(scope="module", params=Layout)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of Qwen3-30B-A3B with a quarter of its experts: 302 MB on disk."""
    config = geometry_config("qwen3-30b-a3b", layers=1, experts=N_EXPERTS, vocab=1000)
    return write_checkpoint(config, tmp_path_factory.mktemp("checkpoint"), layout=request.param)


def proc(file: str, key: str, pid: int | str = "self") -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def build(pipe: Connection, folder: Path) -> None:
    """In a process of its own: says what every other expert takes, and what it read for them."""
    from moeoffload.checkpoint import Checkpoint

    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(folder)
    layer = checkpoint.layers[0]
    checkpoint.build_experts(0, [0], torch.device("cpu"))
    held, read = proc("status", "VmRSS") * 1024, proc("io", "rchar")
    module = checkpoint.build_experts(0, range(1, layer.n_experts, 2), torch.device("cpu"))
    # The files are not mapped, so what was not read through a call was not read at all.
    assert ".safetensors\n" not in Path("/proc/self/maps").read_text()
    read = proc("io", "rchar") - read
    assert sum(parameter.nbytes for parameter in module.parameters()) == N_EXPERTS // 2 * layer.expert_bytes
    pipe.send((N_EXPERTS // 2 * layer.expert_bytes, read, proc("status", "VmHWM") * 1024 - held))


def test_half_of_the_experts_costs_half_of_the_bytes(checkpoint: Path, tmp_path: Path) -> None:
    with contextlib.closing(PipedProcess(tmp_path / "log", build, checkpoint)) as process:
        asked, read, grown = process.asks()
    assert asked == EXPERTS_BYTES // 2
    assert asked <= read < asked + MIB
    assert grown < asked + SPARE_MIB * MIB


def resident_mib(pid: int, *, peak: bool) -> float:
    """Without pages of files, such as libraries, of which more are touched as a process goes on."""
    return (proc("status", "VmHWM" if peak else "VmRSS", pid) - proc("status", "RssFile", pid)) / 1024


def host(pipe: Connection, checkpoint: Path, experts: list[str]) -> None:
    """In a process of its own: opens the model, and computes a prompt."""
    from moeoffload.host.session import open_model

    torch.set_num_threads(1)
    pipe.send("ready")
    pipe.recv()
    with open_model(checkpoint, experts=experts, device="cpu") as offloaded, torch.inference_mode():
        offloaded.model(torch.randint(5, 1000, (1, 512)), logits_to_keep=1)
        held = [server["resident_bytes"] / MIB for server in offloaded.report().servers]
        pipe.send((offloaded.checkpoint.dense_bytes / MIB, held))
        pipe.recv()


@pytest.mark.parametrize("checkpoint", [Layout.PER_EXPERT], indirect=True)
def test_peak_memory_stays_near_what_each_process_must_hold(checkpoint: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ServerProcess(tmp_path)) for _ in range(2)]
        process = PipedProcess(tmp_path / "host.log", host, checkpoint, [server.address for server in servers])
        stack.callback(process.close)
        process.asks()
        pids = [process.pid, *(server.pid for server in servers)]
        before = [resident_mib(pid, peak=False) for pid in pids]
        dense_mib, held_mib = process.asks("go on")
        assert sum(held_mib) == pytest.approx(EXPERTS_BYTES / MIB)
        grown = [resident_mib(pid, peak=True) - was for pid, was in zip(pids, before, strict=True)]
        over = [got - holds for got, holds in zip(grown, [dense_mib, *held_mib], strict=True)]
        assert max(over) < SPARE_MIB, over


SYSTEM_SAYS = Path("/sys/kernel/mm/transparent_hugepage/enabled")
has_them = SYSTEM_SAYS.exists() and "[never]" not in SYSTEM_SAYS.read_text()


def in_huge_pages() -> int:
    """Bytes of this process that are in huge pages."""
    found = re.search(r"AnonHugePages:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.skipif(not has_them, reason="this system has no huge pages")
def test_what_is_read_of_a_checkpoint_lies_in_them(tmp_path: Path) -> None:
    expected = torch.randint(0, 255, (64, MIB), dtype=torch.uint8)
    save_file({"weight": expected}, tmp_path / "model.safetensors")
    before = in_huge_pages()
    with TensorReader() as reader:
        weight = reader.read(TensorIndex.open(tmp_path)["weight"])
    assert in_huge_pages() - before >= 32 * MIB  # the system may have no room for all
    assert torch.equal(weight, expected)


def test_a_system_without_them_gives_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_madvise", lambda: None)
    assert empty_weights((4, MIB), torch.bfloat16).shape == (4, MIB)
