"""/metrics holds every figure of a snapshot, in a form that Prometheus' own parser reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conftest import ROOT
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
