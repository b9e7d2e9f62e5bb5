"""The report says what happened: its parts add up, and bytes and calls are exactly those of the wire format."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import DEMO, ROOT, demo_prompt, local_model

from moeoffload import OffloadedModel, open_model
from moeoffload.host.recorder import DECODE, PREFILL, DeviceClock, Recorder
from moeoffload.wire import HEADER_BYTES


def leaves(data: Any) -> Iterator[str]:
    """Names of all fields below ``data``."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield name
            yield from leaves(value)
    elif isinstance(data, list) and data:
        yield from leaves(data[0])


@pytest.mark.parametrize("pipeline", ["off", "on"])
def test_the_parts_of_both_phases_add_up_to_their_time(three_servers: list[str], pipeline: str) -> None:
    with open_model(
        DEMO, experts=three_servers[:2], pipeline=pipeline, local_experts_gib=1e-4, profile=True, device="cpu"
    ) as offloaded:
        offloaded.model.generate(demo_prompt(800, seed=1), max_new_tokens=40, min_new_tokens=40, do_sample=False)
        report = offloaded.report().to_json()
    assert report["prompt_tokens"] == 800
    assert report["completion_tokens"] == 40
    for name in ("prefill", "decode"):
        phase = report["phases"][name]
        assert phase["complete"]
        assert 0.95 <= phase["accounted"] <= 1.01
        host = phase["host"]
        assert host["wait_s"] == pytest.approx(host["wait_wire_s"] + host["wait_queue_s"] + host["wait_compute_s"])
        servers = [server["phases"][name] for server in report["servers"]]
        for figure in ("calls", "rows", "bytes_out", "bytes_back"):
            assert phase[figure] == sum(server[figure] for server in servers) > 0
        layers = report["layers"][name]
        assert len(layers) == report["model"]["moe_layers"]
        assert sum(layer["wait_s"] for layer in layers) == pytest.approx(host["wait_s"])
    assert report["phases"]["prefill"]["pipelined"] == (pipeline == "on")


def test_every_field_is_documented(three_servers: list[str]) -> None:
    text = (ROOT / "docs" / "report.md").read_text()
    with open_model(DEMO, experts=three_servers[:1], profile=True, device="cpu") as offloaded, torch.inference_mode():
        offloaded.model(torch.tensor([[7, 8, 9]]))
        data = json.loads(json.dumps(offloaded.report().to_json()))
    documented = set(re.findall(r"[a-z_]+", text))
    assert {name for name in leaves(data) if name not in documented} == set()


ITEMSIZE = {"f32": 4, "f16": 2, "bf16": 2}


def prefill(offloaded: OffloadedModel, n_tokens: int) -> dict[str, Any]:
    """The prefill phase of the report after one forward pass over ``n_tokens`` random tokens."""
    prompt = torch.randint(5, 60, (1, n_tokens), generator=torch.manual_seed(2))
    offloaded.recorder.reset()
    with torch.inference_mode():
        offloaded.model(prompt, logits_to_keep=1)
    return offloaded.report().phases["prefill"]


@pytest.mark.parametrize(
    ("mode", "dtype", "n_rows"),
    [("batched", "f32", 300), ("batched", "f16", 300), ("batched", "bf16", 300), ("stream", "bf16", 4)],
)
def test_a_prefill_makes_the_calls_of_its_mode_and_exactly_the_bytes_of_the_format(
    three_servers: list[str], mode: str, dtype: str, n_rows: int
) -> None:
    n_tokens = 1000
    with open_model(
        DEMO, experts=three_servers[:1], mode=mode, dtype=dtype, batch_capacity=300, device="cpu"
    ) as offloaded:
        checkpoint = offloaded.checkpoint
        phase = prefill(offloaded, n_tokens)
    layers = len(checkpoint.layers)
    calls = layers * math.ceil(n_tokens / n_rows)
    values = checkpoint.hidden_size * ITEMSIZE[dtype]
    assert phase["calls"] == calls
    assert phase["rows"] == layers * n_tokens
    assert phase["bytes_out"] == calls * HEADER_BYTES + layers * n_tokens * (values + checkpoint.top_k * (4 + 2))
    assert phase["bytes_back"] == calls * HEADER_BYTES + layers * n_tokens * values


def test_rows_go_only_to_servers_that_hold_one_of_their_experts(three_servers: list[str]) -> None:
    with open_model(DEMO, experts=three_servers, mode="batched", device="cpu") as offloaded:
        routes: list[torch.Tensor] = []
        original = type(offloaded.dispatcher).__call__

        def spy(self: Any, layer: int, hidden: Any, ids: torch.Tensor, weights: Any) -> Any:
            routes.append(ids.clone())
            return original(self, layer, hidden, ids, weights)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(offloaded.dispatcher), "__call__", spy)
            prefill(offloaded, 40)
        report = offloaded.report()
        for link, server in zip(offloaded.links, report.servers, strict=True):
            wanted = [
                int(torch.isin(ids, torch.tensor(held)).any(dim=1).sum())
                for ids, held in zip(routes, link.table.layers, strict=True)
            ]
            assert server["phases"]["prefill"]["rows"] == sum(wanted)
            assert server["phases"]["prefill"]["calls"] == sum(rows > 0 for rows in wanted)


def test_a_server_none_of_whose_experts_are_chosen_gets_no_call(three_servers: list[str]) -> None:
    with open_model(DEMO, experts=three_servers[:2], mode="batched", device="cpu") as offloaded:
        first = offloaded.links[0]
        only_first = torch.tensor([first.table.layers[0][: offloaded.checkpoint.top_k]] * 5)
        hidden = torch.randn(5, offloaded.checkpoint.hidden_size, dtype=offloaded.checkpoint.dtype)
        offloaded.recorder.reset()
        with torch.inference_mode():
            offloaded.dispatcher(0, hidden, only_first, torch.rand(5, offloaded.checkpoint.top_k))
        counted = [server["phases"]["prefill"]["calls"] for server in offloaded.report().servers]
    assert counted == [1, 0]


def test_chunks_at_the_edges_of_the_cap_do_not_change_tokens(three_servers: list[str]) -> None:
    cap = 48
    options = {"max_new_tokens": 12, "do_sample": False}
    local = local_model(DEMO)
    with open_model(DEMO, experts=three_servers[:1], mode="batched", batch_capacity=cap, device="cpu") as offloaded:
        for n_tokens in (cap - 1, cap, cap + 1, 5 * cap + 3):
            prompt = demo_prompt(n_tokens, seed=3)
            assert torch.equal(offloaded.model.generate(prompt, **options), local.generate(prompt, **options))
            assert prefill(offloaded, n_tokens)["calls"] == len(offloaded.checkpoint.layers) * math.ceil(n_tokens / cap)


LAYER_S = 1.0
N_DECODED = 7


class LateDevice:
    """A device that takes ``LAYER_S`` for the dense work of a layer, from when it is told. Time passes only while the
    host waits for it: when rows are fetched to be sent, when the token is, and when an event is awaited."""

    def __init__(self) -> None:
        self.now = 100.0
        self.done_at = 0.0
        self.n_recorded = 0

    def is_told_a_layer(self) -> None:
        self.done_at = max(self.done_at, self.now) + LAYER_S

    def wait(self) -> None:
        self.now = max(self.now, self.done_at)


class LateEvent:
    """Of that device."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.passed_at = 0.0

    def record(self, stream: object) -> None:
        self._device.n_recorded += 1
        self.passed_at = max(self._device.done_at, self._device.now)

    def synchronize(self) -> None:
        self._device.wait()

    def elapsed_time(self, later: Any, /) -> float:
        return 1e3 * float(later.passed_at - self.passed_at)


def use_late_events(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets torch make events of that device."""
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: LateEvent(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)


def on_a_late_device(offloaded: OffloadedModel, monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """Lets the dense layers of an open model seem to be on such a device; the host's work takes no time."""
    device = LateDevice()
    for module in ("dispatcher", "recorder"):
        monkeypatch.setattr(f"moeoffload.host.{module}.perf_counter", lambda: device.now)
    use_late_events(device, monkeypatch)
    monkeypatch.setattr(offloaded.recorder, "_device", torch.device("cuda"))
    offloaded.recorder.reset()
    for link in offloaded.links:

        def pack_late(*chunk: Any, pack: Any = link._pack) -> Any:
            device.wait()
            return pack(*chunk)

        monkeypatch.setattr(link, "_pack", pack_late)
    offloaded.dispatcher.on_routes = lambda *_: device.is_told_a_layer()
    offloaded.model.get_output_embeddings().register_forward_hook(lambda *_: device.is_told_a_layer())
    offloaded.model.register_forward_hook(lambda *_: device.wait())
    return device


def test_dense_work_that_the_host_waits_for_elsewhere_is_dense(
    three_servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_model(DEMO, experts=three_servers[:2], pipeline="off", device="cpu") as offloaded:
        on_a_late_device(offloaded, monkeypatch)
        offloaded.recorder.listen()
        n = N_DECODED + 1
        offloaded.model.generate(demo_prompt(30, seed=1), max_new_tokens=n, min_new_tokens=n, do_sample=False)
        report = offloaded.report()
    for name, n_forwards in (("prefill", 1), ("decode", N_DECODED)):
        phase = report.phases[name]
        assert phase["host"]["dense_s"] == n_forwards * (report.model["moe_layers"] + 1) * LAYER_S  # and the head
        assert phase["host"]["pack_s"] == phase["host"]["other_s"] == 0
        assert phase["seconds"] == phase["host"]["dense_s"]


def test_no_event_is_recorded_while_nobody_listens(three_servers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_model(DEMO, experts=three_servers[:1], pipeline="off", device="cpu") as offloaded, torch.inference_mode():
        device = on_a_late_device(offloaded, monkeypatch)
        ids = torch.tensor([[7, 8, 9]])
        offloaded.model(ids)
        assert device.n_recorded == 0
        offloaded.report()  # listens to what follows
        offloaded.model(ids)
        assert device.n_recorded > 0


def test_a_host_on_a_cpu_asks_no_device(monkeypatch: pytest.MonkeyPatch, three_servers: list[str]) -> None:
    monkeypatch.setattr(DeviceClock, "__init__", lambda *_: pytest.fail("a clock of a GPU was made"))
    with open_model(DEMO, experts=three_servers[:1], device="cpu", profile=True) as offloaded, torch.inference_mode():
        offloaded.model(torch.tensor([[7, 8, 9]]))
        assert offloaded.report().phases["prefill"]["host"]["dense_s"] > 0


def test_each_thread_of_a_pipelined_prompt_has_events_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    use_late_events(LateDevice(), monkeypatch)
    recorder = Recorder(1, 1, torch.device("cuda"), profile=True)
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: recorder.clock).result()
    assert recorder.clock is recorder.clock is not beside


def test_counters_of_threads_that_have_ended_are_kept_together() -> None:
    recorder = Recorder(1, 1, torch.device("cpu"))

    def count() -> None:
        recorder.counters.tokens += 1

    for _ in range(50):
        thread = threading.Thread(target=count)
        thread.start()
        thread.join()
    assert sum(recorder.phases[name].tokens for name in (PREFILL, DECODE)) == 50
    assert len(recorder._by_thread) == 1
