"""Devices that torch does not have; servers with several, for which CPUs stand in with limits of their own."""

from __future__ import annotations

import gc
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_lines import STEP_TIMEOUT_S
from conftest import DEMO, RunningServer, StartServer, connected
from cpu_kernels.experts import random_call
from hypothesis import given, settings
from hypothesis import strategies as st
from models import answers, demo_inputs, local_answers, two_devices
from synthetic import write_tiny
from torch._subclasses.fake_tensor import FakeTensorMode

from moeoffload import devices, open_model
from moeoffload.checkpoint import Checkpoint
from moeoffload.devices import DeviceMemory, device_memory
from moeoffload.errors import CapacityError, SettingError, SystemLimitError
from moeoffload.expert_server.several_devices import LayerParts, LayerSource, SeveralDevices
from moeoffload.kernels import KernelInput, KernelWorkspace, LayerKernels


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


CPU = torch.device("cpu")
TOP_K = 4
SMALL_GIB = 0.0045
"""Two of these hold the demo's experts, and little more."""


@pytest.fixture(params=["bf16", "int4", "gpt_oss"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    if request.param == "gpt_oss":  # biases, and weights stored (in, out)
        return Checkpoint.open(write_tiny("gpt_oss", tmp_path), dtype=torch.bfloat16)
    return Checkpoint.open(DEMO, expert_format=None if request.param == "bf16" else request.param)


@torch.inference_mode()
def test_parts_add_up_to_the_layer(checkpoint: Checkpoint) -> None:
    n_experts = checkpoint.layers[0].n_experts
    whole = LayerKernels(checkpoint.build_experts(0, range(n_experts), CPU), KernelWorkspace(), "auto")
    for counts in ([n_experts], [n_experts - 1, 1], [1, 2, n_experts - 3]):
        source = LayerSource(checkpoint, 0, range(n_experts), KernelWorkspace(), "auto")
        split = LayerParts(source, [(CPU, n) for n in counts])
        split.reserve(40, TOP_K)
        for n_rows in (1, 3, 40, 0):
            rows, slots, weights = random_call(n_rows, whole.hidden, whole.dtype, TOP_K, n_experts, absent=0.1)
            out, again, expected = torch.full((3, n_rows, whole.hidden), float("nan"))
            given = KernelInput(rows, slots, weights, out)
            whole(given._replace(out=expected))
            split(given)
            for _ in split.in_slices(given._replace(out=again)):
                split(KernelInput(rows[:1], slots[:1], weights[:1], torch.empty_like(out[:1])), KernelWorkspace())
            assert (out - expected).norm() <= 2**-16 * expected.norm()
            assert torch.equal(out, again)
        wrong = torch.full((1, TOP_K), n_experts)
        with pytest.raises(IndexError, match="slots must be -1 to"):
            split(KernelInput(rows.new_zeros(1, whole.hidden), wrong, *torch.ones(2, 1, TOP_K)))


class Watched:
    """Computes nothing, and says where it was asked to."""

    def __init__(self, device: str, log: list[str]) -> None:
        self.device, self.log = torch.device(device), log

    def in_slices(self, call: KernelInput, workspace: Any) -> Any:
        self.log.append(str(self.device))
        assert {each.device for each in call} == {self.device}
        call.out.zero_()
        yield


class Table:
    """A fake tensor's index: torch's own one asks for the device's driver."""

    def __init__(self, device: str) -> None:
        self.values = torch.empty(2, 9, dtype=torch.int64, device=device)
        self.device = self.values.device

    def __getitem__(self, key: Any) -> torch.Tensor:
        found: torch.Tensor = torch.ops.aten.index.Tensor(self.values, [None, key[1]])
        return found


@pytest.mark.parametrize("first", ["cuda:0", "cuda:1"])
def test_each_part_gets_tensors_of_its_device_and_nothing_waits(first: str) -> None:
    """Fake tensors know devices that are not there, refuse to mix them, and to be read."""
    layer = object.__new__(LayerParts)
    names, log = [first, "cuda:2"], list[str]()
    with FakeTensorMode():
        layer.n_experts, layer._devices = 8, tuple(map(torch.device, names))
        parts: Any = tuple(Watched(name, log) for name in names)
        layer._parts = parts
        layer._places = Table(first)  # type: ignore[assignment]
        rows, out = torch.empty(5, 16, device="cuda:0"), torch.empty(5, 16, device="cuda:0")
        slots = torch.empty(5, TOP_K, dtype=torch.int64, device="cuda:0")
        layer(KernelInput(rows, slots, torch.empty(5, TOP_K, device="cuda:0"), out))
    assert log == ["cuda:2", first], "the others begin first"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=2, max_size=4), st.integers(1, 90), st.integers(1, 40))
def test_no_device_gets_more_than_it_holds(budgets: list[int], expert_bytes: int, n_experts: int) -> None:
    several, held = SeveralDevices([CPU] * len(budgets), budgets), [0] * len(budgets)
    while (counts := several._take(n_experts, expert_bytes, 1.0)) is not None:
        assert sum(counts) == n_experts
        held = [have + count * expert_bytes for have, count in zip(held, counts, strict=True)]
        assert all(have <= budget for have, budget in zip(held, budgets, strict=True))
    assert sum(each // expert_bytes for each in several.free) < n_experts, "refused only where there is no room"


def test_layers_are_split_alike_and_memory_comes_back() -> None:
    checkpoint = Checkpoint.open(DEMO)
    size = checkpoint.layers[0].expert_bytes
    several = SeveralDevices([CPU] * 3, [60 * size, 60 * size, 30 * size])
    made_room = list[int]()

    def build(layer: int) -> LayerKernels:
        source = LayerSource(checkpoint, layer, range(32), KernelWorkspace(), "auto")
        return several.build(source, lambda: made_room.append(layer))

    layers = [build(layer) for layer in range(4)]
    counts = [[part.n_experts for part in each._parts] for each in layers]  # type: ignore[attr-defined]
    assert all(abs(count - part) < 1 for each in counts for count, part in zip(each, (12.8, 12.8, 6.4), strict=True))
    used = [60 * size, 60 * size, 30 * size]
    assert sum(several.free) == sum(used) - 4 * 32 * size
    with pytest.raises(CapacityError, match=r"layer 0: 32 experts of .* do not fit; taken are cpu: .*, cpu: .*, cpu: "):
        build(0)
    assert made_room == [0]
    layers.clear()
    gc.collect()
    assert several.free == used


def taken(server: RunningServer) -> list[tuple[float, float]]:
    """GiB that experts took on each device, as said after each load, and of how many."""
    lines = [line for line in server.log_text.splitlines() if "taken are" in line]
    return [(float(a), float(b)) for line in lines for a, b in re.findall(r"cpu: (\S+) of (\S+) GiB", line)]


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_server_with_two_devices_gives_the_tokens_of_a_local_run(start_server: StartServer, transport: str) -> None:
    server = start_server("--memory-gib", str(SMALL_GIB), "--keep-warm", "off", patch=two_devices)
    offered = []
    for _ in range(2):
        with connected(server.address) as client:
            offered.append(client.describe(STEP_TIMEOUT_S).offered_bytes)
        with open_model(DEMO, experts=[server.address], transport=transport, device="cpu", slots=1) as offloaded:
            assert answers(offloaded.model, demo_inputs(32)) == local_answers(n=32)
            (about,) = offloaded.report().to_json()["servers"]
            assert (about["kernel"], about["device"]) == ("tiled on 2 devices", "cpu, cpu")
    assert offered[0] == offered[1] <= 2 * SMALL_GIB * 2**30
    loads = taken(server)
    assert len(loads) == 4
    assert loads[:2] == loads[2:], "the second host found all of the memory"
    assert all(0.4 * budget < used <= budget == SMALL_GIB for used, budget in loads)


def test_ram_goes_with_one_device(start_server: StartServer) -> None:
    with pytest.raises(RuntimeError, match="ram-gib: goes with one GPU; start a server for each of several"):
        start_server("--memory-gib", "1", "--ram-gib", "1", patch=two_devices)
