"""/metrics holds every figure of a snapshot, in a form that Prometheus' own parser reads."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from serving_snapshots import scripted

from moeoffload.serve.metrics import render_metrics

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


def wanted(snapshot: dict[str, Any]) -> Samples:
    """Every figure of ``snapshot`` that is to be found."""
    found: Samples = {}

    def add(name: str, value: float, /, **labels: str) -> None:
        found[f"moeoffload_{name}", frozenset(labels.items())] = value

    def add_histogram(name: str, data: dict[str, Any], **labels: str) -> None:
        below = 0
        for bound, count in zip([*data["bounds"], None], data["counts"], strict=True):
            below += count
            add(f"{name}_bucket", below, le="+Inf" if bound is None else str(float(bound)), **labels)
        assert below == data["n"]
        add(f"{name}_count", data["n"], **labels)
        add(f"{name}_sum", data["total"], **labels)

    model = snapshot["model"]
    add("model_info", 1, version=snapshot["version"], model=model["name"], type=model["type"], dtype=model["dtype"])
    add("uptime_seconds", snapshot["uptime_s"])
    for name, count in snapshot["requests"].items():
        if name in ("running", "waiting"):
            add(f"requests_{name}", count)
        else:
            add("requests_total", count, result=name)
    for name, count in snapshot["tokens"].items():
        add(f"{name}_tokens_total", count)
    cache = snapshot["cache"]
    for name, key in {"used_tokens": "used_tokens", "kept_tokens": "kept_tokens",
                      "capacity_tokens": "total_tokens", "capacity_bytes": "total_bytes"}.items():  # fmt: skip
        add(f"cache_{name}", cache[key])
    for name in ("first_token", "between_tokens"):
        add_histogram(f"{name}_seconds", snapshot[f"{name}_s"])
    add_histogram("step_rows", snapshot["step_rows"])
    steps = dict(snapshot["steps"])
    add("steps_total", steps.pop("steps"))
    add("steps_in_two_groups_total", steps.pop("in_two_groups"))
    add("step_seconds_total", steps.pop("seconds"))
    for name, seconds in steps.items():
        add("step_part_seconds_total", seconds, part=name.removesuffix("_s"))
    for name, count in snapshot["recovery"].items():
        if name != "events":
            add("recovery_total", count, event=name)
    names = {"calls": "calls_total", "rows": "rows_total", "bytes_out": "sent_bytes_total",
             "bytes_back": "received_bytes_total", "queue_s": "queue_seconds_total", "compute_s":
             "compute_seconds_total", "wait_s": "wait_seconds_total", "n_experts": "experts",
             "resident_bytes": "resident_bytes"}  # fmt: skip
    for server in snapshot["servers"]:
        label = {"server": server["address"]}
        add("server_info", 1, **label, **{name: server[name] for name in ("device", "transport", "kernel")})
        for key, name in names.items():
            add(f"server_{name}", server[key], **label)
        for state in ("up", "replaced", "lost"):
            add("server_state", state == server["state"], **label, state=state)
        if "batches" in server:
            add_histogram("server_batch_members", server["batches"]["members"], **label)
            add("server_batch_wait_seconds_total", server["batches"]["wait_s"], **label)
    return found


def test_every_figure_is_there_and_no_other() -> None:
    snapshot = scripted(6)[-1]
    assert snapshot["requests"]["running"]
    assert snapshot["servers"][1]["state"] == "replaced"
    assert parsed(snapshot) == wanted(snapshot)


def test_a_fresh_host_without_servers_and_with_odd_names_is_read() -> None:
    snapshot = scripted(1, model='a "model"\nof \\ mine')[0]
    snapshot["servers"] = []
    assert parsed(snapshot) == wanted(snapshot)
