"""What tests of everything that shows figures share: snapshots as of a busy host."""

from __future__ import annotations

import json
from typing import Any

from moeoffload.serve.figures import History, figures
from moeoffload.serve.stats import CacheUse, RequestCounts, ServingStats

SERVERS = ("192.168.1.20:50051", "192.168.1.21:50051")
_LAYER = {
    "dense": 310e-6, "pack": 42e-6, "local": 0, "wire": 95e-6, "queue": 60e-6, "compute": 420e-6, "combine": 35e-6,
}  # fmt: skip


def scripted(n: int, *, n_layers: int = 24, model: str = "Qwen3-30B-A3B") -> list[dict[str, Any]]:
    """Snapshots of ``n`` seconds in which requests come and go; the second server is away in the last ones."""
    stats = ServingStats()
    stats.cache = CacheUse(9_000, 14_000, 65_536, 6 << 30)
    parts = dict.fromkeys((*(f"{part}_s" for part in _LAYER), "other_s"), 0.0)
    servers = [_server(address) for address in SERVERS]
    layers = [dict.fromkeys(("calls", *(f"{part}_s" for part in _LAYER)), 0.0) for _ in range(n_layers)]
    found = []
    for second in range(n):
        stats.requests = RequestCounts(running=4 + second % 7, waiting=second % 3, finished=2 * second, cancelled=1)
        for number in range(28 + second % 6):
            _step(number, stats, parts, layers, servers)
        away = second > n - 4
        servers[1]["state"] = "replaced" if away else "up"
        servers[1]["computed_by"] = "this host" if away else f"expert server {SERVERS[1]}"
        event = {"at_s": second, "server": SERVERS[1], "what": "lost", "why": "the lease ended", "seconds": 0.0}
        recovery = {"lost": int(away), "returned": 0, "drained": 0, "stale": 3}
        snapshot = stats.snapshot() | {
            "time": 1.8e9 + second,
            "uptime_s": 4000.0 + second,
            "version": "0.1.0",
            "memory": {
                "device": "cuda:0",
                "allocated_bytes": 7_000 + second,
                "reserved_bytes": 9 << 30,
                "total_bytes": 23 << 30,
            },
            "model": {"name": model, "type": "qwen3_moe", "dtype": "bfloat16", "layers": n_layers},
            "servers": servers,
            "recovery": recovery | {"events": [event] if away else []},
            "layers": layers,
        }
        snapshot["steps"] |= parts
        found.append(json.loads(json.dumps(snapshot)))
    return found


def _step(
    number: int,
    stats: ServingStats,
    parts: dict[str, float],
    layers: list[dict[str, float]],
    servers: list[dict[str, Any]],
) -> None:
    """One step of the running requests; every tenth has a part of a prompt, too."""
    running, n_layers = stats.requests.running, len(layers)
    rows = running + (0 if number % 10 else 96)
    stats.step_rows.add(rows)
    stats.tokens.completion += running
    stats.tokens.prompt += rows - running
    for request in range(running):
        stats.between_tokens_s.add(0.02 + 0.003 * ((number + request) % 9))
    if rows > running:
        stats.first_token_s.add(0.1 + 0.01 * number)
        stats.tokens.reused += 60
    stats.steps.steps += 1
    for n, layer in enumerate(layers):
        layer["calls"] += 1
        for part, usual in _LAYER.items():
            seconds = usual * (0.7 + 0.1 * ((number + n) % 8))
            layer[f"{part}_s"] += seconds
            parts[f"{part}_s"] += seconds
            stats.steps.seconds += seconds
    parts["other_s"] += 0.0012
    stats.steps.seconds += 0.0012
    for n, server in enumerate(servers):
        each = {
            "calls": 1, "rows": rows, "bytes_out": 64 + rows * 4144, "bytes_back": 64 + rows * 4096,
            "queue_s": 6e-5, "compute_s": 2e-4 + n * 1e-4, "wait_s": 3e-4 + n * 1e-4,
        }  # fmt: skip
        for name, value in each.items():
            server[name] += value * n_layers
        members, n_members = server["batches"]["members"], 1 + number % 6
        members["counts"][min(n_members - 1, 4)] += n_layers
        members["total"] += n_members * n_layers
        members["n"] += n_layers
        server["batches"]["wait_s"] += 4e-5 * n_layers


def _server(address: str) -> dict[str, Any]:
    return {
        "address": address, "device": "cuda:0", "device_name": "a GPU", "transport": "stream", "kernel": "triton",
        "state": "up", "computed_by": "", "n_experts": 1536, "resident_bytes": 14_495_514_624, "calls": 0, "rows": 0,
        "bytes_out": 0, "bytes_back": 0, "queue_s": 0.0, "compute_s": 0.0, "wait_s": 0.0,
        "batches": {"members": {"bounds": [1, 2, 3, 4, 8], "counts": [0] * 6, "total": 0, "n": 0}, "wait_s": 0.0,
                    "warm_bytes": 3 << 30, "allocated_bytes": 60 << 30, "reserved_bytes": 61 << 30,
                    "total_bytes": 79 << 30, "fast_bytes": 0, "fast_routes": 0, "slow_routes": 0, "moves": 0},
    }  # fmt: skip


def with_figures(snapshots: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same as the host that took them answers, with the figures of now."""
    history, found = History(), []
    for snapshot in snapshots:
        history.add(snapshot)
        found.append(json.loads(json.dumps(snapshot | {"now": figures(history)})))
    return found


class Told:
    """Answers each request for a snapshot with the next one, and later requests with the last."""

    def __init__(self, snapshots: list[dict[str, Any]]) -> None:
        self.snapshots, self.asked = snapshots, 0

    def __call__(self, watch: bool) -> dict[str, Any]:
        number = min(self.asked, len(self.snapshots) - 1)
        self.asked += 1
        return self.snapshots[number]
