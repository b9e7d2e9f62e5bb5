"""What tests of everything that shows figures share: snapshots as of a busy host, and a server for them."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moeoffload.serve.dashboard import dashboard_page
from moeoffload.serve.figures import History, figures
from moeoffload.serve.stats import ServingStats

SERVERS = ("192.168.1.20:50051", "192.168.1.21:50051")
_LAYER = {
    "dense": 310e-6,
    "pack": 42e-6,
    "local": 0,
    "wire": 95e-6,
    "queue": 60e-6,
    "compute": 420e-6,
    "combine": 35e-6,
}


def scripted(n: int, *, n_layers: int = 24, seed: int = 3, model: str = "Qwen3-30B-A3B") -> list[dict[str, Any]]:
    """Snapshots of ``n`` seconds in which requests come and go; the second server is away in the last ones."""
    chance = random.Random(seed)
    stats = ServingStats()
    parts = dict.fromkeys((*(f"{part}_s" for part in _LAYER), "other_s"), 0.0)
    servers = [_server(address) for address in SERVERS]
    layers = [dict.fromkeys(("calls", *(f"{part}_s" for part in _LAYER)), 0.0) for _ in range(n_layers)]
    found = []
    running = 6
    for second in range(n):
        _advance(chance, stats, parts, servers, layers, running=running)
        running = min(12, max(2, running + chance.choice((-1, 0, 0, 1))))
        away = second > n - 4
        servers[1]["state"] = "replaced" if away else "up"
        servers[1]["computed_by"] = "this host" if away else f"expert server {SERVERS[1]}"
        recovery = {"lost": int(away), "returned": 0, "drained": 0, "hedged": 0, "stale": 3}
        event = {"at_s": second, "server": SERVERS[1], "what": "lost", "why": "the lease ended", "seconds": 0.0}
        counted = stats.snapshot()
        counted["steps"] |= parts
        snapshot = counted | {
            "time": 1.8e9 + second,
            "uptime_s": 4000.0 + second,
            "version": "0.1.0",
            "model": {"name": model, "type": "qwen3_moe", "dtype": "bfloat16", "layers": n_layers},
            "servers": servers,
            "recovery": recovery | {"events": [event] if away else []},
            "layers": layers,
        }
        found.append(json.loads(json.dumps(snapshot)))
    return found


def with_figures(snapshots: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same as the host that took them answers, with the figures of now."""
    history, found = History(), []
    for snapshot in snapshots:
        history.add(snapshot)
        found.append(json.loads(json.dumps(snapshot | {"now": figures(history)})))
    return found


def _server(address: str) -> dict[str, Any]:
    return {
        "address": address, "device": "cuda:0", "device_name": "a GPU", "transport": "stream", "kernel": "triton",
        "state": "up", "computed_by": "", "n_experts": 1536, "resident_bytes": 14_495_514_624, "calls": 0, "rows": 0,
        "bytes_out": 0, "bytes_back": 0, "queue_s": 0.0, "compute_s": 0.0, "wait_s": 0.0,
        "batches": {"members": {"bounds": [1, 2, 3, 4, 8], "counts": [0] * 6, "total": 0, "n": 0}, "wait_s": 0.0},
    }  # fmt: skip


def _advance(
    chance: random.Random,
    stats: ServingStats,
    parts: dict[str, float],
    servers: list[dict[str, Any]],
    layers: list[dict[str, float]],
    running: int,
) -> None:
    n_steps = 28 + chance.randrange(6)
    stats.requests.running, stats.requests.waiting = running, max(0, running - 9)
    stats.requests.finished += chance.randrange(3)
    stats.requests.cancelled += chance.random() < 0.05
    stats.cache.total_tokens, stats.cache.total_bytes = 65_536, 6 << 30
    stats.cache.used_tokens, stats.cache.kept_tokens = 1800 * running, 14_000
    for _ in range(n_steps):
        rows = running + (96 if chance.random() < 0.1 else 0)
        stats.step_rows.add(rows)
        stats.tokens.completion += running
        stats.tokens.prompt += rows - running
        for _ in range(running):
            stats.between_tokens_s.add(chance.gammavariate(9, 0.0034))
        if rows > running:
            stats.first_token_s.add(chance.gammavariate(5, 0.06))
            stats.tokens.reused += 60
        _step(chance, stats, parts, layers)
        for number, server in enumerate(servers):
            _call(chance, server, rows, len(layers), compute_s=(2e-4, 3e-4)[number])


def _step(chance: random.Random, stats: ServingStats, parts: dict[str, float], layers: list[dict[str, float]]) -> None:
    steps = stats.steps
    steps.steps += 1
    for layer in layers:
        layer["calls"] += 1
        for part, usual in _LAYER.items():
            seconds = usual * chance.uniform(0.7, 1.5)
            layer[f"{part}_s"] += seconds
            parts[f"{part}_s"] += seconds
            steps.seconds += seconds
    parts["other_s"] += 0.0012
    steps.seconds += 0.0012


def _call(chance: random.Random, server: dict[str, Any], rows: int, n_layers: int, compute_s: float) -> None:
    server["calls"] += n_layers
    server["rows"] += rows * n_layers
    server["bytes_out"] += (64 + rows * 4144) * n_layers
    server["bytes_back"] += (64 + rows * 4096) * n_layers
    server["queue_s"] += 6e-5 * n_layers
    server["compute_s"] += compute_s * n_layers
    server["wait_s"] += 1.3 * compute_s * n_layers
    batches = server["batches"]
    n_members = min(6, 1 + int(chance.expovariate(1)))
    batches["members"]["counts"][min(n_members - 1, 4)] += n_layers
    batches["members"]["total"] += n_members * n_layers
    batches["members"]["n"] += n_layers
    batches["wait_s"] += 4e-5 * n_layers


@dataclass
class SnapshotServer:
    """A host as far as whoever shows figures sees it: each question for ``stats`` gets the next snapshot, later ones
    the last."""

    snapshots: list[dict[str, Any]]
    key: str = ""
    asked: int = 0
    keys: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, authorization: str) -> tuple[int, str, bytes]:
        if path == "/dashboard":
            return 200, "text/html; charset=utf-8", dashboard_page().encode()
        if path != "/stats":
            return 404, "text/plain", b""
        if self.key and authorization != f"Bearer {self.key}":
            return 401, "application/json", b"{}"
        number = min(self.asked, len(self.snapshots) - 1)
        self.asked += 1
        return 200, "application/json", json.dumps(self.snapshots[number]).encode()


@contextlib.contextmanager
def serving(server: SnapshotServer) -> Iterator[SnapshotServer]:
    """Serves on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            code, kind, body = server.answer(path, self.headers.get("Authorization", ""))
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        log_message: Callable[..., None] = lambda *_: None

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join(10)
