"""The figures of an open model: totals, current rates, /metrics; those of its report, and the times of layers."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from command_lines import wait_until
from conftest import DEMO, ROOT, StartServer, demo_prompt
from prometheus_client.parser import text_string_to_metric_families
from serving_snapshots import scripted

from moeoffload import OffloadedModel, open_model
from moeoffload.devices import DeviceMemory
from moeoffload.errors import ServerError
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.figures import LAYER_PARTS, PARTS, PAUSE_S, History, figures, histogram_difference, quantile
from moeoffload.serve.metrics import render_metrics
from moeoffload.serve.request import FinishReason
from moeoffload.serve.snapshot import Snapshots
from moeoffload.serve.stats import LATENCY_BOUNDS_S, Histogram, ServingStats

from .client import ask, limits


def history_of(snapshots: list[dict[str, Any]]) -> History:
    history = History()
    for snapshot in snapshots:
        history.add(snapshot)
    return history


def test_rates_are_of_the_last_seconds_and_latencies_of_the_last_minute() -> None:
    snapshots = scripted(90, n_layers=3)
    shown = figures(history_of(snapshots))
    new, old = snapshots[-1], snapshots[-4]
    assert shown["tokens_per_s"] == pytest.approx((new["tokens"]["completion"] - old["tokens"]["completion"]) / 3)
    server, before = new["servers"][0], old["servers"][0]
    assert shown["servers"][0]["rows_per_s"] == pytest.approx((server["rows"] - before["rows"]) / 3)
    assert shown["servers"][0]["busy"] == pytest.approx((server["compute_s"] - before["compute_s"]) / 3)
    n, older = new["steps"], snapshots[-11]["steps"]
    n_steps = n["steps"] - older["steps"]
    assert shown["step_parts"]["wire"] == pytest.approx((n["wire_s"] - older["wire_s"]) / n_steps)
    assert shown["step_s"] is not None
    assert sum(shown["step_parts"].values()) == pytest.approx(shown["step_s"])
    in_layers = sum(sum(layer[part] for part in LAYER_PARTS) for layer in shown["layers"])
    assert in_layers + shown["step_parts"]["other"] == pytest.approx(shown["step_s"])
    minute = histogram_difference(new["between_tokens_s"], snapshots[-61]["between_tokens_s"])
    assert 0 < minute["n"] == sum(minute["counts"]) < new["between_tokens_s"]["n"]
    assert shown["between_tokens_s"] == (quantile(minute, 0.5), quantile(minute, 0.95))


def test_quantiles_lie_within_the_bucket_of_the_exact_ones() -> None:
    values = sorted(0.0004 * 1.13**i for i in range(100))
    histogram = Histogram(LATENCY_BOUNDS_S)
    for value in values:
        histogram.add(value)
    data = asdict(histogram)
    for share in (0.05, 0.5, 0.9):
        exact = values[int(share * 100) - 1]
        upper = next(bound for bound in LATENCY_BOUNDS_S if bound >= exact)
        lower = max([0.0, *(bound for bound in LATENCY_BOUNDS_S if bound < exact)])
        found = quantile(data, share)
        assert found is not None
        assert lower <= found <= upper
    assert quantile(data, 1.0) == LATENCY_BOUNDS_S[-1]  # beyond it nothing is known


def test_nothing_is_made_up_where_nothing_happened() -> None:
    snapshot = scripted(1, n_layers=2)[0]
    for snapshots in ([snapshot], [snapshot, snapshot | {"uptime_s": snapshot["uptime_s"] + 1}]):
        shown = figures(history_of(snapshots))
        assert shown["tokens_per_s"] == shown["servers"][0]["busy"] == 0
        assert shown["first_token_s"] == (None, None)
        assert shown["step_s"] is None
        assert shown["rows_per_step"] is None
        assert shown["layers"] == []


def test_batches_count_from_when_their_server_first_told_of_them_or_started_again() -> None:
    snapshots = scripted(20, n_layers=2)
    for server in snapshots[0]["servers"]:
        del server["batches"]
    members = figures(history_of(snapshots))["batch_members"]
    first, last = (sum(server["batches"]["members"]["n"] for server in snapshots[i]["servers"]) for i in (1, -1))
    assert members["n"] == last - first > 0
    fresh = {"bounds": [1, 2, 3, 4, 8], "counts": [2, 1, 0, 0, 0, 0], "total": 4, "n": 3}
    for server in snapshots[-1]["servers"]:
        server["batches"]["members"] = fresh
    members = figures(history_of(snapshots))["batch_members"]
    assert (members["counts"], members["n"]) == ([4, 2, 0, 0, 0, 0], 6)


@pytest.mark.parametrize("uptime_s", [1.0, 4019.0 + 1.1 * PAUSE_S])
def test_a_host_that_started_again_and_a_pause_begin_a_new_history(uptime_s: float) -> None:
    first, *later = scripted(20, n_layers=2)
    history = history_of([*later, first | {"uptime_s": uptime_s}])
    assert figures(history)["tokens_per_s"] == 0
    assert history.before(60) is history.newest


def test_a_history_holds_a_minute_however_long_and_by_how_many_it_is_watched() -> None:
    snapshots = scripted(200, n_layers=1)
    often = [each | {"uptime_s": each["uptime_s"] + later} for each in snapshots for later in (0, 0.001, 0.1)]
    kept = list(history_of(often)._snapshots)
    assert len(kept) <= 2 * 62
    assert kept[-1] is often[-1]
    assert 60 <= kept[-1]["uptime_s"] - kept[0]["uptime_s"] <= 62


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(snapshot: dict[str, Any]) -> Samples:
    body, kind = render_metrics(snapshot)
    assert kind.startswith("text/plain")
    found: Samples = {}
    for family in text_string_to_metric_families(body.decode()):
        assert family.name.startswith("moeoffload_")
        assert family.documentation
        for sample in family.samples:
            where = (sample.name, frozenset(sample.labels.items()))
            assert where not in found
            found[where] = sample.value
    return found


def numbers(data: Any, skipped: tuple[str, ...]) -> Iterator[float]:
    """All numbers of a snapshot but those under the names of ``skipped``."""
    for name, value in data.items() if isinstance(data, dict) else enumerate(data):
        if name in skipped:
            continue
        if isinstance(value, dict | list):
            yield from numbers(value, skipped)
        elif isinstance(value, int | float):
            yield value


def test_every_figure_is_there_and_every_name_is_documented() -> None:
    snapshot = scripted(6)[-1]
    assert snapshot["servers"][1]["state"] == "replaced"
    found = parsed(snapshot)
    # Counts of a histogram are sums over its buckets there; layers are not for scrapers, nor are a model's.
    missing = set(numbers(snapshot, ("bounds", "counts", "layers", "time", "events"))) - set(found.values())
    assert not missing
    histogram = snapshot["step_rows"]
    below = [sum(histogram["counts"][: n + 1]) for n in range(len(histogram["counts"]))]
    assert [value for (name, _), value in found.items() if name == "moeoffload_step_rows_bucket"] == below
    state = {dict(labels)["state"]: value for (name, labels), value in found.items() if name.endswith("server_state")}
    assert state == {"up": 0, "replaced": 1, "lost": 0}
    text = (ROOT / "docs" / "monitoring.md").read_text()
    for name, _ in found:
        plain = name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
        ends = {plain.removeprefix("moeoffload").removeprefix(part) for part in ("_requests", "_cache", "_server", "")}
        assert any(f"`{end}`" in text for end in {plain, *ends}), name


def test_a_fresh_host_without_servers_and_with_odd_names_is_read() -> None:
    model = 'a "model"\nof \\ mine'
    snapshot = scripted(1, model=model)[0]
    snapshot["servers"] = []
    info = next(labels for name, labels in parsed(snapshot) if name == "moeoffload_model_info")
    assert dict(info)["model"] == model


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
    parts, of_threads = sum(steps[f"{part}_s"] for part in PARTS), steps["seconds"] + steps["beside_s"]
    assert 0.9 * of_threads <= parts + steps["turn_s"] <= 1.01 * of_threads
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


def test_a_server_that_cannot_be_read_is_logged_and_the_others_are_seen(
    three_servers: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = open_model(DEMO, experts=three_servers[:2], device="cpu")
    with opened as offloaded, contextlib.closing(Snapshots(offloaded, ServingStats())) as snapshots:
        monkeypatch.setattr(offloaded.links[0].client, "stats", lambda _: 1 / 0)
        wait_until(lambda: "batches" in snapshots.take(True)["servers"][1], "what the other server tells", 10)
    assert "ZeroDivisionError" in caplog.text


def test_what_servers_tell_comes_with_later_snapshots_their_batches_and_their_memory(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(patch=_gpu_of_the_server)
    monkeypatch.setattr("moeoffload.serve.snapshot.device_memory", lambda _: DeviceMemory(10, 20, 40))
    opened = open_model(DEMO, experts=[server.address], device="cpu")
    with opened as offloaded, contextlib.closing(Snapshots(offloaded, ServingStats())) as snapshots:
        generate(offloaded, 4)
        wait_until(lambda: "batches" in snapshots.take(True)["servers"][0], "what the server tells")
        snapshot = snapshots.take(True)
    assert snapshot["memory"] == {
        "device": "cpu", "allocated_bytes": 10, "reserved_bytes": 20, "total_bytes": 40
    }  # fmt: skip
    told, members = snapshot["servers"][0]["batches"], snapshot["servers"][0]["batches"]["members"]
    assert members["n"] == sum(members["counts"]) == snapshot["servers"][0]["calls"]
    assert members["counts"][0] == members["total"]  # one host, one request at a time
    assert told["wait_s"] > 0
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
