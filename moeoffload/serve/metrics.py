"""A snapshot in Prometheus' text form, for /metrics. docs/monitoring.md lists the names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from moeoffload.serve.figures import PARTS

_STATES: Final = ("up", "replaced", "lost")
_RESULTS: Final = ("finished", "cancelled", "failed", "rejected")
_OF_DEVICES: Final = (
    ("allocated_bytes", "Memory of its device in use: in tensors on a GPU, resident on a CPU"),
    ("reserved_bytes", "Of its device the process holds: in use, or kept by torch"),
    ("total_bytes", "Memory of its device"),
)
_VALUES: Final = (
    (CounterMetricFamily, "prompt_tokens", "tokens", "prompt", "Tokens of prompts"),
    (CounterMetricFamily, "reused_tokens", "tokens", "reused", "Of these, taken from the cache"),
    (CounterMetricFamily, "guessed_tokens", "tokens", "guessed", "Tokens that were guessed ahead"),
    (CounterMetricFamily, "guessed_right_tokens", "tokens", "guessed_right", "Of these, right ones"),
    (CounterMetricFamily, "completion_tokens", "tokens", "completion", "Tokens of answers"),
    (CounterMetricFamily, "steps", "steps", "steps", "Steps of the engine"),
    (CounterMetricFamily, "step_seconds", "steps", "seconds", "Seconds of all steps"),
    (GaugeMetricFamily, "requests_running", "requests", "running", "Requests that have a place in the batch"),
    (GaugeMetricFamily, "requests_waiting", "requests", "waiting", "Requests in the queue"),
    (GaugeMetricFamily, "cache_used_tokens", "cache", "used_tokens", "Tokens in the cache, of running requests"),
    (GaugeMetricFamily, "cache_kept_tokens", "cache", "kept_tokens", "Tokens kept in the cache to be reused"),
    (GaugeMetricFamily, "cache_capacity_tokens", "cache", "total_tokens", "Tokens that the cache can hold"),
    (GaugeMetricFamily, "cache_capacity_bytes", "cache", "total_bytes", "Memory of the cache"),
    *((GaugeMetricFamily, f"device_{key}", "memory", key, text) for key, text in _OF_DEVICES),
)
"""Kind, name, where it stands in a snapshot, and what it is."""
_HISTOGRAMS: Final = (
    ("first_token_seconds", "first_token_s", "From the request to its first token"),
    ("between_tokens_seconds", "between_tokens_s", "From a token to the next"),
    ("step_rows", "step_rows", "Rows (tokens) of each step"),
)
_OF_SERVERS: Final = (
    (CounterMetricFamily, "calls", "calls", "Dispatches of rows"),
    (CounterMetricFamily, "rows", "rows", "Rows sent"),
    (CounterMetricFamily, "sent_bytes", "bytes_out", "Bytes of frames sent"),
    (CounterMetricFamily, "received_bytes", "bytes_back", "Bytes of frames received"),
    (CounterMetricFamily, "queue_seconds", "queue_s", "From received to started, on the server"),
    (CounterMetricFamily, "compute_seconds", "compute_s", "Computing, on the server"),
    (CounterMetricFamily, "wait_seconds", "wait_s", "The host stood still for replies"),
    (GaugeMetricFamily, "experts", "n_experts", "Experts that the server holds for this host"),
    (GaugeMetricFamily, "resident_bytes", "resident_bytes", "Bytes of these experts"),
)
_TOLD_BY_SERVERS: Final = (
    (CounterMetricFamily, "batch_wait_seconds", "wait_s", "What the oldest request of each kernel call waited"),
    (GaugeMetricFamily, "warm_bytes", "warm_bytes", "Bytes of experts whose hosts have left, kept for the next one"),
    *((GaugeMetricFamily, f"device_{key}", key, text) for key, text in _OF_DEVICES),
    (GaugeMetricFamily, "fast_bytes", "fast_bytes", "With --ram-gib: bytes of experts on the device"),
    (CounterMetricFamily, "fast_routes", "fast_routes", "With --ram-gib: rows times experts computed on the device"),
    (CounterMetricFamily, "slow_routes", "slow_routes", "With --ram-gib: rows times experts computed in RAM"),
    (CounterMetricFamily, "moves", "moves", "With --ram-gib: experts that came to the device for others"),
)

Family = type[CounterMetricFamily] | type[GaugeMetricFamily]


def render_metrics(snapshot: dict[str, Any]) -> tuple[bytes, str]:
    """The body and the content type of an answer to a scraper; ``snapshot`` is one of `Snapshots`."""
    return generate_latest(_SnapshotCollector(snapshot)), CONTENT_TYPE_LATEST


class _SnapshotCollector(Collector):
    """Gives the metrics of one snapshot."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        data = self._snapshot
        model = data["model"]
        info = {"version": data["version"], "model": model["name"], "type": model["type"], "dtype": model["dtype"]}
        yield InfoMetricFamily("moeoffload_model", "The model that is served", value=info)
        yield GaugeMetricFamily("moeoffload_uptime_seconds", "Since the engine was started", value=data["uptime_s"])
        for kind, name, group, key, text in _VALUES:
            yield kind(f"moeoffload_{name}", text, value=data[group][key])
        for name, key, text in _HISTOGRAMS:
            buckets, total = _buckets(data[key]), data[key]["total"]
            yield HistogramMetricFamily(f"moeoffload_{name}", text, buckets=buckets, sum_value=total)
        results = {result: data["requests"][result] for result in _RESULTS}
        yield _by("result", CounterMetricFamily, "requests", "Requests by what became of them", results)
        parts = {part: data["steps"][f"{part}_s"] for part in PARTS}
        yield _by("part", CounterMetricFamily, "step_part_seconds", "Where the seconds of steps went", parts)
        events = {event: count for event, count in data["recovery"].items() if event != "events"}
        yield _by("event", CounterMetricFamily, "recovery", "Server events, by kind", events)
        yield from _of_servers({server["address"]: server for server in data["servers"]})


def _of_servers(servers: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    about = InfoMetricFamily("moeoffload_server", "An expert server", labels=["server"])
    state = GaugeMetricFamily("moeoffload_server_state", "1 for the state the server is in", labels=["server", "state"])
    members = HistogramMetricFamily(
        "moeoffload_server_batch_members", "Requests in one kernel call, of all hosts", labels=["server"]
    )
    told = {address: server["batches"] for address, server in servers.items() if "batches" in server}
    for address, server in servers.items():
        about.add_metric([address], {name: server[name] for name in ("device", "transport", "kernel")})
        for each in _STATES:
            state.add_metric([address, each], float(server["state"] == each))
    for address, batches in told.items():
        members.add_metric([address], _buckets(batches["members"]), batches["members"]["total"])
    yield from (about, state, members)
    for table, values in ((_OF_SERVERS, servers), (_TOLD_BY_SERVERS, told)):
        for kind, name, key, text in table:
            yield _by("server", kind, f"server_{name}", text, {address: each[key] for address, each in values.items()})


def _by(label: str, kind: Family, name: str, text: str, values: dict[str, float]) -> Metric:
    """A metric for each value of ``label``."""
    family = kind(f"moeoffload_{name}", text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


def _buckets(data: dict[str, Any]) -> list[tuple[str, float]]:
    """Prometheus counts everything up to a bound."""
    bounds = [*(floatToGoString(bound) for bound in data["bounds"]), "+Inf"]
    return list(zip(bounds, accumulate(data["counts"]), strict=True))
