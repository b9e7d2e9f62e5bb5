"""What happens now, computed from snapshots."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from serving_snapshots import scripted

from moeoffload.serve.figures import LAYER_PARTS, PAUSE_S, History, figures, histogram_difference, quantile
from moeoffload.serve.stats import LATENCY_BOUNDS_S, Histogram


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
