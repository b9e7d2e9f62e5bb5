"""The report of a host on a GPU tells dense work from what waits for it. A stand-in for the GPU takes its time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import DEMO, demo_prompt

from moeoffload import OffloadedModel, open_model
from moeoffload.host.recorder import DeviceClock, Recorder

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
    offloaded.dispatcher.on_layer = lambda layer: device.is_told_a_layer()
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
