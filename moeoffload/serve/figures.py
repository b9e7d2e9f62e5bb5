"""Current rates, as differences between snapshots of counters that only grow (docs/monitoring.md)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

NOW_S: Final = 3.0  # window of current rates, in seconds
STEP_S: Final = 10.0  # window of the parts of a step, in seconds
LATENCY_S: Final = 60.0  # window of latencies and batch sizes, in seconds
PARTS: Final = ("dense", "pack", "wire", "queue", "compute", "local", "combine", "other")
"""The parts of a step, in display order."""
LAYER_PARTS: Final = PARTS[:-1]
PAUSE_S: Final = 70.0  # the history restarts after so many seconds without a snapshot; longer than any interval of top
_EPSILON_S: Final = 1e-6
_LEAST_STEP_S: Final = 0.25


class History:
    """The snapshots that were requested within the last `LATENCY_S` seconds."""

    def __init__(self) -> None:
        self._snapshots: deque[dict[str, Any]] = deque()

    def add(self, snapshot: dict[str, Any]) -> None:
        """Adds the newest snapshot. After a pause of more than `PAUSE_S` older ones are dropped."""
        kept = self._snapshots
        if kept and not 0 <= snapshot["uptime_s"] - kept[-1]["uptime_s"] <= PAUSE_S:
            kept.clear()
        # Several clients may ask: one snapshot per `_LEAST_STEP_S` is enough.
        if len(kept) > 1 and snapshot["uptime_s"] - kept[-2]["uptime_s"] < _LEAST_STEP_S:
            kept.pop()
        kept.append(snapshot)
        while len(kept) > 2 and kept[1]["uptime_s"] <= snapshot["uptime_s"] - LATENCY_S + _EPSILON_S:
            kept.popleft()

    @property
    def newest(self) -> dict[str, Any]:
        """The snapshot that was added last."""
        return self._snapshots[-1]

    def before(self, seconds: float) -> dict[str, Any]:
        """The newest snapshot that is at least ``seconds`` old, or the oldest."""
        limit = self.newest["uptime_s"] - seconds + _EPSILON_S
        return next((each for each in reversed(self._snapshots) if each["uptime_s"] <= limit), self._snapshots[0])

    def batch_members(self) -> dict[str, Any] | None:
        """Histogram of requests per kernel call, over all servers, since each first reported it; None if none has."""
        first: dict[str, dict[str, Any]] = {}
        told: dict[str, dict[str, Any]] = {}
        for snapshot in self._snapshots:
            told = {each["address"]: each["batches"]["members"] for each in snapshot["servers"] if "batches" in each}
            first = told | first
        parts = [histogram_difference(members, first[address]) for address, members in told.items()]
        if not parts:
            return None
        counts = [sum(counts) for counts in zip(*(part["counts"] for part in parts), strict=True)]
        sums = {name: sum(part[name] for part in parts) for name in ("total", "n")}
        return {"bounds": parts[0]["bounds"], "counts": counts} | sums


def figures(history: History) -> dict[str, Any]:
    """Current figures from the snapshots of ``history``, as plain data; docs/monitoring.md describes every field."""
    new, old = history.newest, history.before(NOW_S)
    seconds = new["uptime_s"] - old["uptime_s"]
    older, oldest = history.before(STEP_S), history.before(LATENCY_S)
    tokens, cache = new["tokens"], new["cache"]
    steps = new["steps"]["steps"] - older["steps"]["steps"]
    rows = histogram_difference(new["step_rows"], oldest["step_rows"])
    members = history.batch_members()
    return {
        "watched_s": new["uptime_s"] - history.before(LATENCY_S)["uptime_s"],
        "tokens_per_s": _rate(tokens["completion"] - old["tokens"]["completion"], seconds),
        "prompt_tokens_per_s": _rate(tokens["prompt"] - old["tokens"]["prompt"], seconds),
        "steps_per_s": _rate(new["steps"]["steps"] - old["steps"]["steps"], seconds),
        "reuse": _share(tokens["reused"], tokens["prompt"]),
        "cache_use": _share(cache["used_tokens"] + cache["kept_tokens"], cache["total_tokens"]),
        "first_token_s": _p50_p95(histogram_difference(new["first_token_s"], oldest["first_token_s"])),
        "between_tokens_s": _p50_p95(histogram_difference(new["between_tokens_s"], oldest["between_tokens_s"])),
        "first_token_all_s": _p50_p95(new["first_token_s"]),
        "between_tokens_all_s": _p50_p95(new["between_tokens_s"]),
        "rows": rows,
        "rows_per_step": _share(rows["total"], rows["n"]),
        "step_s": _share(new["steps"]["seconds"] - older["steps"]["seconds"], steps),
        "step_parts": _mean_parts(PARTS, new["steps"], older["steps"], steps),
        "layers": _layers(new["layers"], older["layers"]),
        "servers": [_load(server, old["servers"], seconds) for server in new["servers"]],
        "batch_members": members,
        "members_per_batch": _share(members["total"], members["n"]) if members else None,
    }


def histogram_difference(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Values added to a histogram between two snapshots; all values if it was reset (a server restarted)."""
    if new["n"] < old["n"]:
        return new
    return {
        "bounds": new["bounds"],
        "counts": [count - before for count, before in zip(new["counts"], old["counts"], strict=True)],
        "total": new["total"] - old["total"],
        "n": new["n"] - old["n"],
    }


def quantile(histogram: dict[str, Any], share: float) -> float | None:
    """The quantile ``share`` as Prometheus estimates it: by linear interpolation within a bucket.

    None for an empty histogram; the last bound if the quantile is above it.
    """
    wanted, below, lower = share * histogram["n"], 0, 0.0
    if histogram["n"] <= 0:
        return None
    for bound, count in zip(histogram["bounds"], histogram["counts"], strict=False):
        if count and below + count >= wanted:
            return float(lower + (bound - lower) * (wanted - below) / count)
        below, lower = below + count, bound
    return float(histogram["bounds"][-1])


def _p50_p95(histogram: dict[str, Any]) -> tuple[float | None, float | None]:
    return quantile(histogram, 0.5), quantile(histogram, 0.95)


def _layers(new: list[dict[str, Any]], old: list[dict[str, Any]]) -> list[dict[str, float]]:
    calls = [layer["calls"] - before["calls"] for layer, before in zip(new, old, strict=True)]
    each = zip(new, old, calls, strict=True)
    return [_mean_parts(LAYER_PARTS, layer, before, n) for layer, before, n in each] if any(calls) else []


def _mean_parts(parts: Sequence[str], new: dict[str, Any], old: dict[str, Any], n: int) -> dict[str, float]:
    """Mean seconds of each part over the ``n`` steps or calls between two snapshots."""
    return {part: (new[f"{part}_s"] - old[f"{part}_s"]) / n if n else 0.0 for part in parts}


def _load(server: dict[str, Any], before: list[dict[str, Any]], seconds: float) -> dict[str, float]:
    old = next((each for each in before if each["address"] == server["address"]), server)
    calls = server["calls"] - old["calls"]
    n_bytes = server["bytes_out"] + server["bytes_back"] - old["bytes_out"] - old["bytes_back"]
    return {
        "calls_per_s": _rate(calls, seconds),
        "rows_per_s": _rate(server["rows"] - old["rows"], seconds),
        "bytes_per_s": _rate(n_bytes, seconds),
        "busy": min(1.0, _rate(server["compute_s"] - old["compute_s"], seconds)),
        "wait_s": _share(server["wait_s"] - old["wait_s"], calls) or 0.0,
    }


def _rate(difference: float, seconds: float) -> float:
    return difference / seconds if seconds > 0 else 0.0


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
