"""The figures of an open model: those of its report, and the times of layers."""

from __future__ import annotations

import contextlib
import json
import signal
from typing import Any

import pytest
import torch
from command_lines import wait_until
from conftest import DEMO, ROOT, StartServer, demo_prompt

from moeoffload import OffloadedModel, open_model
from moeoffload.device_memory import DeviceMemory
from moeoffload.errors import ServerError
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.metrics import render_metrics
from moeoffload.serve.request import FinishReason
from moeoffload.serve.snapshot import Snapshots
from moeoffload.serve.stats import ServingStats

from .client import ask, limits

COUNTED = ("calls", "rows", "bytes_out", "bytes_back", "queue_s", "compute_s", "wait_s")


def generate(offloaded: OffloadedModel, n: int) -> None:
    offloaded.model.generate(demo_prompt(40, seed=1), max_new_tokens=n, min_new_tokens=n, do_sample=False)


def look(offloaded: OffloadedModel, *, watch: bool = True, stats: ServingStats | None = None) -> dict[str, Any]:
    with contextlib.closing(Snapshots(offloaded, stats or ServingStats())) as snapshots:
        data: dict[str, Any] = json.loads(json.dumps(snapshots.take(watch)))
    return data


def test_servers_and_layers_have_the_figures_of_the_report(three_servers: list[str]) -> None:
    with open_model(DEMO, experts=three_servers[:2], local_experts_gib=1e-4, device="cpu") as offloaded:
        generate(offloaded, 4)
        assert all(layer["calls"] == 4 for layer in look(offloaded)["layers"])
        generate(offloaded, 6)
        snapshot, report = look(offloaded), offloaded.report()
    assert snapshot["model"] == {
        "name": "checkpoint", "type": report.model["model_type"], "dtype": report.model["dtype"],
        "layers": report.model["moe_layers"],
    }  # fmt: skip
    for server, reported in zip(snapshot["servers"], report.servers, strict=True):
        assert server["state"] == "up"
        for name in ("address", "device", "transport", "kernel", "n_experts", "resident_bytes"):
            assert server[name] == reported[name]
        for name in COUNTED:
            assert server[name] == pytest.approx(sum(phase[name] for phase in reported["phases"].values()))
    hosts = [phase["host"] for phase in report.phases.values()]
    for part, name in {"pack": "pack_s", "local": "local_s", "wire": "wait_wire_s", "queue": "wait_queue_s",
                       "compute": "wait_compute_s", "combine": "combine_s"}.items():  # fmt: skip
        in_layers = sum(layer[f"{part}_s"] for layer in snapshot["layers"])
        assert in_layers == pytest.approx(sum(host[name] for host in hosts))
    assert all(layer["calls"] == 10 for layer in snapshot["layers"])
    dense = sum(layer["dense_s"] for layer in snapshot["layers"])
    assert 0 < dense < sum(host["dense_s"] for host in hosts)
    assert render_metrics(snapshot)


def test_the_parts_of_the_engines_steps_add_up_to_their_time(three_servers: list[str]) -> None:
    with open_model(DEMO, experts=three_servers[:2], device="cpu") as offloaded:
        prompt = demo_prompt(30, seed=2)[0].tolist()
        with ServingEngine(offloaded, limits()) as engine:
            answers = [ask(engine, prompt, 40, ignore_eos=True) for _ in range(3)]
            assert {answer.finish for answer in answers} == {FinishReason.LENGTH}
            snapshot = look(offloaded, stats=engine.stats)
    steps = snapshot["steps"]
    assert snapshot["requests"]["finished"] == 3
    assert snapshot["tokens"]["completion"] == 120
    assert 40 <= steps["steps"] <= 120
    parts = sum(seconds for name, seconds in steps.items() if name.endswith("_s"))
    assert 0.9 * steps["seconds"] <= parts <= 1.01 * steps["seconds"]
    assert sum(snapshot["step_rows"]["counts"]) == steps["steps"]


def test_a_lost_server_is_seen_and_who_stands_in_for_it(start_server: StartServer) -> None:
    stays, goes = start_server(), start_server()
    with open_model(DEMO, experts=[stays.address, goes.address], device="cpu") as offloaded:
        goes.process.send_signal(signal.SIGKILL)
        wait_until(lambda: look(offloaded)["recovery"]["lost"], "the loss")
        up, away = look(offloaded)["servers"]
        with torch.no_grad():
            offloaded.model(torch.tensor([[7, 8, 9]]))
        # A call on a connection that is closed already would end this process.
        with pytest.raises(ServerError):
            offloaded.links[1].client.stats(1.0)
    assert (up["state"], away["state"]) == ("up", "replaced")
    assert away["address"] == goes.address
    assert "host" in away["computed_by"]


def test_what_servers_tell_of_their_batches_comes_with_later_snapshots(start_server: StartServer) -> None:
    server = start_server()
    opened = open_model(DEMO, experts=[server.address], device="cpu")
    with opened as offloaded, contextlib.closing(Snapshots(offloaded, ServingStats())) as snapshots:
        generate(offloaded, 4)
        wait_until(lambda: "batches" in snapshots.take(True)["servers"][0], "what the server tells")
        told = snapshots.take(True)["servers"][0]
    members = told["batches"]["members"]
    assert members["n"] == sum(members["counts"]) == told["calls"]
    assert members["counts"][0] == members["total"]  # one host, one request at a time
    assert told["batches"]["wait_s"] > 0


def test_a_server_that_cannot_be_read_is_logged_and_the_others_are_seen(
    three_servers: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = open_model(DEMO, experts=three_servers[:2], device="cpu")
    with opened as offloaded, contextlib.closing(Snapshots(offloaded, ServingStats())) as snapshots:
        monkeypatch.setattr(offloaded.links[0].client, "stats", lambda _: 1 / 0)
        wait_until(lambda: "batches" in snapshots.take(True)["servers"][1], "what the other server tells", 10)
    assert "ZeroDivisionError" in caplog.text


def test_the_memory_of_both_sides_devices_is_there(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(patch=_gpu_of_the_server)
    monkeypatch.setattr("moeoffload.serve.snapshot.device_memory", lambda _: DeviceMemory(10, 20, 40))
    opened = open_model(DEMO, experts=[server.address], device="cpu")
    with opened as offloaded, contextlib.closing(Snapshots(offloaded, ServingStats())) as snapshots:
        wait_until(lambda: "batches" in snapshots.take(True)["servers"][0], "what the server tells")
        snapshot = snapshots.take(True)
    assert snapshot["memory"] == {
        "device": "cpu", "allocated_bytes": 10, "reserved_bytes": 20, "total_bytes": 40
    }  # fmt: skip
    told = snapshot["servers"][0]["batches"]
    assert [told[f"{kind}_bytes"] for kind in ("allocated", "reserved", "total")] == [3 << 30, 4 << 30, 24 << 30]
    metrics = dict(line.rsplit(" ", 1) for line in render_metrics(snapshot)[0].decode().splitlines())
    assert float(metrics["moeoffload_device_reserved_bytes"]) == 20
    assert float(metrics[f'moeoffload_server_device_total_bytes{{server="{server.address}"}}']) == 24 << 30


def _gpu_of_the_server() -> None:
    """In the server's process: a stand-in for its device."""
    import moeoffload.expert_server.service as expert_service

    expert_service.device_memory = lambda *devices: DeviceMemory(3 << 30, 4 << 30, 24 << 30)


def test_every_field_is_documented(three_servers: list[str]) -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    with open_model(DEMO, experts=three_servers[:1], device="cpu") as offloaded:
        snapshot = look(offloaded, watch=False)
    for name, value in snapshot.items():
        assert f"`{name}`" in text
        inner = value[0] if isinstance(value, list) else value
        for each in inner if isinstance(inner, dict) else ():
            assert f"`{each}`" in text or name == "recovery", f"{name}.{each}"
