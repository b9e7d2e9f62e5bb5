"""In steady state the decode path makes nothing new, on either side."""

from __future__ import annotations

import gc
import shutil
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import DEMO
from models import edit_config
from server_processes import ServerProcess

from moeoffload import open_model
from moeoffload.control.client import ControlClient
from moeoffload.devices import DeviceMemory

WARM_UP, STEPS = 150, 500
LEAK_BYTES = 16_384
"""A leak of one small object per step would be 24 KiB or more."""


def traced_bytes() -> int:
    """What Python objects hold on this side, without garbage that merely waits for its collector.

    Python's cache of attribute lookups holds names; transformers makes new ones at every step, so it fills by and by.
    """
    gc.collect()
    sys._clear_type_cache()
    return tracemalloc.get_traced_memory()[0]


def trace_server() -> None:
    """Has a server tell what its Python objects hold in place of its memory."""
    from moeoffload.expert_server import service

    tracemalloc.start()
    service.device_memory = lambda *_: DeviceMemory(traced_bytes(), 0, 0)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model cut to two of its layers: what is made per step or per layer shows all the same."""
    folder: Path = shutil.copytree(DEMO, tmp_path_factory.mktemp("two") / "layers")
    edit_config(folder, num_hidden_layers=2)
    return folder


@pytest.fixture(scope="module")
def traced_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("traced")
    with (
        ServerProcess(folder, patch=trace_server) as one,
        ServerProcess(folder, patch=trace_server) as two,
    ):
        yield [one.address, two.address]


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_decode_steps_make_no_new_objects(two_layers: Path, traced_servers: list[str], transport: str) -> None:
    clients = [ControlClient(address) for address in traced_servers]

    def server_state() -> list[tuple[dict[str, int], int]]:
        stats = [client.stats(30) for client in clients]
        return [(dict(reply.pool_creations), reply.memory.allocated_bytes) for reply in stats]

    with (
        open_model(two_layers, experts=traced_servers, transport=transport, device="cpu") as offloaded,
        torch.inference_mode(),
    ):
        cache = offloaded.model(torch.tensor([[7, 8, 9]])).past_key_values
        token = torch.tensor([[11]])

        def decode(steps: int) -> None:
            for _ in range(steps):
                offloaded.model(token, past_key_values=cache)
                cache.crop(-1)

        tracemalloc.start()
        try:
            decode(WARM_UP)
            host_before, servers_before = offloaded.pool_creations, server_state()
            traced_before = traced_bytes()
            decode(STEPS)
            traced_after = traced_bytes()
            host_after, servers_after = offloaded.pool_creations, server_state()
        finally:
            tracemalloc.stop()
    for client in clients:
        client.close()
    assert host_after == host_before
    assert [pools for pools, _ in servers_after] == [pools for pools, _ in servers_before]
    assert traced_after - traced_before < LEAK_BYTES
    for (_, before), (_, after) in zip(servers_before, servers_after, strict=True):
        assert 0 < after < before + LEAK_BYTES
