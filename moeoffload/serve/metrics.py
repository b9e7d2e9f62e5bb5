"""A snapshot in Prometheus' text form, for /metrics. docs/monitoring.md lists the names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

STATES: Final = ("up", "replaced", "lost")
_RESULTS: Final = ("finished", "cancelled", "failed", "rejected")
_PARTS: Final = ("dense", "pack", "wire", "queue", "compute", "local", "combine", "other")
_SERVER_COUNTERS: Final = (
    ("calls", "calls", "Dispatches of rows"),
    ("rows", "rows", "Rows sent"),
    ("sent_bytes", "bytes_out", "Bytes of frames sent"),
    ("received_bytes", "bytes_back", "Bytes of frames received"),
    ("queue_seconds", "queue_s", "From received to started, on the server"),
    ("compute_seconds", "compute_s", "Computing, on the server"),
    ("wait_seconds", "wait_s", "The host stood still for replies"),
)
_SERVER_GAUGES: Final = (
    ("experts", "n_experts", "Experts that the server holds for this host"),
    ("resident_bytes", "resident_bytes", "Bytes of these experts"),
)


def render_metrics(snapshot: dict[str, Any]) -> tuple[bytes, str]:
    """The body and the content type of an answer to a scraper; ``snapshot`` is one of `serving_snapshot`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SnapshotCollector(snapshot))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _SnapshotCollector(Collector):
    """Gives the metrics of one snapshot."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering need not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        data = self._snapshot
        model = data["model"]
        info = {"version": data["version"], "model": model["name"], "type": model["type"], "dtype": model["dtype"]}
        yield InfoMetricFamily("moeoffload_model", "The model that is served", value=info)
        yield _gauge("moeoffload_uptime_seconds", "Since the engine was started", data["uptime_s"])
        yield from _of_requests(data)
        yield from _of_steps(data)
        yield from _of_servers(data["servers"])
        recovery = CounterMetricFamily("moeoffload_recovery", "What befell expert servers", labels=["event"])
        for event, count in data["recovery"].items():
            if event != "events":
                recovery.add_metric([event], count)
        yield recovery


def _of_requests(data: dict[str, Any]) -> Iterator[Metric]:
    requests, tokens, cache = data["requests"], data["tokens"], data["cache"]
    yield _gauge("moeoffload_requests_running", "Requests that have a place in the batch", requests["running"])
    yield _gauge("moeoffload_requests_waiting", "Requests in the queue", requests["waiting"])
    ended = CounterMetricFamily("moeoffload_requests", "Requests by what became of them", labels=["result"])
    for result in _RESULTS:
        ended.add_metric([result], requests[result])
    yield ended
    yield _counter("moeoffload_prompt_tokens", "Tokens of prompts", tokens["prompt"])
    yield _counter("moeoffload_reused_tokens", "Of these, taken from the cache", tokens["reused"])
    yield _counter("moeoffload_guessed_tokens", "Tokens that were guessed ahead", tokens["guessed"])
    yield _counter("moeoffload_guessed_right_tokens", "Of these, right ones", tokens["guessed_right"])
    yield _counter("moeoffload_completion_tokens", "Tokens of answers", tokens["completion"])
    yield _gauge("moeoffload_cache_used_tokens", "Tokens in the cache, of running requests", cache["used_tokens"])
    yield _gauge("moeoffload_cache_kept_tokens", "Tokens kept in the cache to be reused", cache["kept_tokens"])
    yield _gauge("moeoffload_cache_capacity_tokens", "Tokens that the cache can hold", cache["total_tokens"])
    yield _gauge("moeoffload_cache_capacity_bytes", "Memory of the cache", cache["total_bytes"])
    yield _histogram("moeoffload_first_token_seconds", "From the request to its first token", data["first_token_s"])
    yield _histogram("moeoffload_between_tokens_seconds", "From a token to the next", data["between_tokens_s"])


def _of_steps(data: dict[str, Any]) -> Iterator[Metric]:
    steps = data["steps"]
    yield _counter("moeoffload_steps", "Steps of the engine", steps["steps"])
    yield _counter("moeoffload_step_seconds", "Seconds of all steps", steps["seconds"])
    parts = CounterMetricFamily("moeoffload_step_part_seconds", "Where the seconds of steps went", labels=["part"])
    for part in _PARTS:
        parts.add_metric([part], steps[f"{part}_s"])
    yield parts
    yield _histogram("moeoffload_step_rows", "Rows (tokens) of each step", data["step_rows"])


def _of_servers(servers: list[dict[str, Any]]) -> Iterator[Metric]:
    about = InfoMetricFamily("moeoffload_server", "An expert server", labels=["server"])
    state = GaugeMetricFamily(
        "moeoffload_server_state", "1 for the state that the server is in", labels=["server", "state"]
    )
    for server in servers:
        about.add_metric([server["address"]], {name: server[name] for name in ("device", "transport", "kernel")})
        for each in STATES:
            state.add_metric([server["address"], each], float(server["state"] == each))
    yield from (about, state)
    for name, key, text in _SERVER_COUNTERS:
        counter = CounterMetricFamily(f"moeoffload_server_{name}", text, labels=["server"])
        for server in servers:
            counter.add_metric([server["address"]], server[key])
        yield counter
    for name, key, text in _SERVER_GAUGES:
        gauge = GaugeMetricFamily(f"moeoffload_server_{name}", text, labels=["server"])
        for server in servers:
            gauge.add_metric([server["address"]], server[key])
        yield gauge
    telling = [server for server in servers if "batches" in server]
    members = HistogramMetricFamily(
        "moeoffload_server_batch_members", "Requests in one kernel call, of all hosts", labels=["server"]
    )
    wait = CounterMetricFamily(
        "moeoffload_server_batch_wait_seconds", "What the oldest request of each kernel call waited", labels=["server"]
    )
    for server in telling:
        histogram = server["batches"]["members"]
        members.add_metric([server["address"]], _buckets(histogram), histogram["total"])
        wait.add_metric([server["address"]], server["batches"]["wait_s"])
    yield from (members, wait)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def _histogram(name: str, text: str, data: dict[str, Any]) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, buckets=_buckets(data), sum_value=data["total"])


def _buckets(data: dict[str, Any]) -> list[tuple[str, float]]:
    """Prometheus counts everything up to a bound."""
    bounds = [*(floatToGoString(bound) for bound in data["bounds"]), "+Inf"]
    return list(zip(bounds, accumulate(data["counts"]), strict=True))
