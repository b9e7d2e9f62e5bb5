"""Experts stay in a server's memory after their host has left: until others need it, or their files change."""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import CLEAN_TIMEOUT_S, STEP_TIMEOUT_S, wait_until
from conftest import DEMO, RunningServer, StartServer, connected
from synthetic import write_tiny

from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.tensors import TensorIndex
from moeoffload.control.protocol import dtype_label
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.errors import CapacityError
from moeoffload.expert_server.store import ExpertStore, LayerKey
from moeoffload.host.session import open_model
from moeoffload.placement import ExpertTable

PROMPT = torch.arange(5, 25).unsqueeze(0)


def demo_bytes() -> int:
    return sum(layer.n_experts * layer.expert_bytes for layer in Checkpoint.open(DEMO).layers)


def run(model: Path, *servers: RunningServer) -> torch.Tensor:
    """Logits of a prompt, computed by a host that leaves before this returns."""
    addresses = [server.address for server in servers]
    with open_model(model, experts=addresses, threads=1, device="cpu") as offloaded, torch.inference_mode():
        logits: torch.Tensor = offloaded.model(PROMPT).logits
    wait_until(lambda: not any(stats(server).leases for server in servers), "the end of the leases", CLEAN_TIMEOUT_S)
    return logits


def stats(server: RunningServer) -> pb.StatsReply:
    with connected(server.address) as client:
        return client.stats(STEP_TIMEOUT_S)


def offered(server: RunningServer) -> int:
    with connected(server.address) as client:
        return client.describe(STEP_TIMEOUT_S).offered_bytes


@pytest.mark.parametrize("n_servers", [1, 2])
def test_the_next_host_with_the_same_part_reads_nothing(start_server: StartServer, n_servers: int) -> None:
    servers = [start_server("--memory-gib", "2") for _ in range(n_servers)]
    before = [offered(server) for server in servers]
    logits = run(DEMO, *servers)
    first = [stats(server) for server in servers]
    assert sum(each.warm_bytes for each in first) == sum(each.read_bytes for each in first) >= demo_bytes()
    assert [each.resident_bytes for each in first] == [0] * n_servers
    assert [offered(server) for server in servers] == before, "what is warm counts as free"
    assert torch.equal(run(DEMO, *servers), logits)
    assert [stats(server).read_bytes for server in servers] == [each.read_bytes for each in first]


def test_another_model_gets_the_memory_and_only_what_it_took_is_read_again(
    start_server: StartServer, tmp_path: Path
) -> None:
    other = write_tiny("mixtral", tmp_path, dtype=torch.float32)
    about = Checkpoint.open(other)
    needed = sum(layer.n_experts * layer.expert_bytes for layer in about.layers)
    server = start_server("--memory-gib", str((demo_bytes() + needed // 2) / (1 << 30)), "--batch-capacity", "1")
    logits = run(DEMO, server)
    run(other, server)
    after = stats(server)
    assert 0 < demo_bytes() + needed - after.warm_bytes < demo_bytes()
    again = demo_bytes() - (after.warm_bytes - needed)
    assert torch.equal(run(DEMO, server), logits)
    assert stats(server).read_bytes == after.read_bytes + again


def test_nothing_stays_where_it_is_switched_off(start_server: StartServer) -> None:
    server = start_server("--keep-warm", "off")
    for n_reads in (1, 2):
        run(DEMO, server)
        assert (stats(server).warm_bytes, stats(server).read_bytes) == (0, n_reads * demo_bytes())


def test_a_file_that_has_changed_is_read_again_also_where_the_digest_does_not_look(
    start_server: StartServer, tmp_path: Path
) -> None:
    model = shutil.copytree(DEMO, tmp_path / "model")
    server = start_server("--model-root", str(tmp_path))
    digest = Checkpoint.open(model).digest
    before = run(model, server)
    for tensor in TensorIndex.open(model):
        if "experts" in tensor.name and tensor.nbytes > 3 * 4096:
            with tensor.file.open("r+b") as file:  # no sampled block is touched
                file.seek(tensor.offset + 4096)
                file.write(bytes(tensor.nbytes - 2 * 4096))
    assert Checkpoint.open(model).digest == digest
    after = run(model, server)
    assert not torch.equal(after, before)
    assert torch.equal(after, run(model, start_server("--model-root", str(tmp_path))))


def test_the_budget_holds_and_what_is_used_stays_whatever_hosts_do() -> None:
    random.seed(7)
    store, sizes, used = ExpertStore(100), (20, 30, 45), list[LayerKey]()
    kept: dict[LayerKey, Any] = {}
    for step in range(2000):
        key = LayerKey("model", "bf16", number := random.randrange(9), (0,))
        if used and random.random() < 0.5:
            store.release(used.pop(random.randrange(len(used))))
        else:
            try:
                module: Any = store.acquire(key, sizes[number % 3], lambda step=step: step)  # type: ignore[arg-type,misc]
            except CapacityError:
                assert store.free_bytes < sizes[number % 3]
                continue
            assert module == kept.get(key, module) or key not in used, "hosts share what one of them uses"
            kept[key] = module
            used.append(key)
        assert store.resident_bytes + store.warm_bytes <= 100
        assert store.resident_bytes == sum(sizes[key.layer % 3] for key in set(used))
        assert store.free_bytes == 100 - store.resident_bytes


class LetsABuildEnd:
    """A lock after whose first release by this thread something else happens, such as the end of a build that another
    thread has begun."""

    def __init__(self, inner: Any, end: Any) -> None:
        self._inner, self._end, self._thread, self._done, self._depth = inner, end, threading.get_ident(), False, 0

    def __enter__(self) -> None:
        self._inner.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        is_free = self._depth == 0
        self._inner.release()
        if threading.get_ident() == self._thread and is_free and not self._done:
            self._done = True
            self._end()


def test_experts_whose_build_ends_meanwhile_are_never_counted_as_free() -> None:
    store, begun, goes_on = ExpertStore(100), threading.Event(), threading.Event()

    def build() -> Any:
        begun.set()
        assert goes_on.wait(STEP_TIMEOUT_S)
        return "experts"

    builder = threading.Thread(target=store.acquire, args=(LayerKey("model", "bf16", 0, (0,)), 60, build))
    builder.start()
    assert begun.wait(STEP_TIMEOUT_S)

    def end() -> None:
        goes_on.set()
        builder.join(STEP_TIMEOUT_S)

    store._lock = LetsABuildEnd(store._lock, end)  # type: ignore[assignment]
    assert store.free_bytes == 40
    assert store.free_bytes == 40


def test_experts_whose_host_leaves_meanwhile_are_not_offered_twice() -> None:
    store, key = ExpertStore(100), LayerKey("model", "bf16", 0, (0,))
    store.acquire(key, 60, lambda: "experts")  # type: ignore[arg-type,return-value]
    store._lock = LetsABuildEnd(store._lock, lambda: store.release(key))  # type: ignore[assignment]
    assert store.offered_bytes("model", "bf16") == 100


def test_weight_errors_are_in_the_order_of_layers_whatever_is_warm(server: RunningServer) -> None:
    checkpoint = Checkpoint.open(DEMO, expert_format="int4")
    how = {"digest": checkpoint.digest, "compute_dtype": dtype_label(checkpoint.dtype), "expert_format": "int4"}
    whole = tuple(tuple(range(layer.n_experts)) for layer in checkpoint.layers)
    errors = []
    with connected(server.address) as client:
        for layers in (((), (), *whole[2:]), whole, whole):
            with contextlib.closing(client.attach(STEP_TIMEOUT_S)) as lease:
                model, told = pb.ModelReference(reference=str(DEMO), **how), lambda loaded, total: None
                errors.append(lease.load(model, ExpertTable(layers), progress=told, timeout_s=STEP_TIMEOUT_S))
    last, some_warm, all_warm = errors
    assert some_warm is not None
    assert some_warm == all_warm
    assert some_warm[2:] == last


def test_a_host_with_experts_that_are_there_does_not_wait_for_those_of_another() -> None:
    store, begun, goes_on = ExpertStore(100), threading.Event(), threading.Event()
    there, other = (LayerKey("model", "bf16", layer, (0,)) for layer in (0, 1))
    found: list[Any] = []
    store.acquire(there, 10, lambda: "experts")  # type: ignore[arg-type,return-value]

    def build() -> Any:
        begun.set()
        assert goes_on.wait(STEP_TIMEOUT_S)
        return "others"

    builder = threading.Thread(target=store.acquire, args=(other, 60, build))
    builder.start()
    assert begun.wait(STEP_TIMEOUT_S)
    asks = threading.Thread(target=lambda: found.append(store.acquire(there, 10, build)), daemon=True)
    asks.start()
    asks.join(5)
    found_meanwhile = list(found)
    goes_on.set()
    builder.join(STEP_TIMEOUT_S)
    assert found_meanwhile == ["experts"]
