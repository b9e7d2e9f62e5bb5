"""The rows of one dispatch: a small shared segment does not cut them, and whatever does says so."""

from __future__ import annotations

import pytest
from conftest import DEMO, StartServer

from moeoffload.checkpoint import Checkpoint
from moeoffload.host.session import open_model
from moeoffload.placement import batch_row_bytes

GIB = 1 << 30


def capacity_of(address: str) -> int:
    with open_model(DEMO, experts=[address], threads=1, device="cpu") as model:
        return int(model.report().servers[0]["batch_capacity"])


def shrinkings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "rows instead of" in record.getMessage()]


def test_the_shared_bytes_are_a_floor_and_cut_no_batch(
    start_server: StartServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_MOE_EXPERT_COMPUTE_IPC_SHARED_BYTES", "100000")
    server = start_server("--transport", "shared")
    assert capacity_of(server.address) == 1024
    assert shrinkings(caplog) == []


def test_a_servers_own_limit_is_told(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    server = start_server("--batch-capacity", "100")
    assert capacity_of(server.address) == 100
    assert shrinkings(caplog) == [
        f"expert server {server.address}: batch capacity is 100 rows instead of 1024: its own --batch-capacity"
    ]
    assert "batch capacity is 100 rows instead of 1024: this server's batch-capacity" in server.log_text


def test_too_little_memory_for_the_batch_is_told(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = Checkpoint.open(DEMO)
    experts = sum(layer.n_experts * layer.expert_bytes for layer in checkpoint.layers)
    widest = max(layer.intermediate for layer in checkpoint.layers)
    row = batch_row_bytes(checkpoint.hidden_size, checkpoint.top_k, widest, checkpoint.dtype.itemsize, 4)
    server = start_server("--memory-gib", str((experts + 300 * row) / GIB))
    rows = capacity_of(server.address)
    assert rows < 300
    text = f"batch capacity is {rows} rows instead of 1024: "
    assert shrinkings(caplog) == [f"expert server {server.address}: {text}its memory has no room for more"]
    assert text in server.log_text
