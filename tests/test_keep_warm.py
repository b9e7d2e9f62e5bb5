"""Experts in a server's memory: shared by hosts of the same model, kept after they left until others need the room."""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import CLEAN_TIMEOUT_S, STEP_TIMEOUT_S, wait_until
from conftest import DEMO, RunningServer, StartServer, connected, local_model, stats, wait_until_left
from models import all_experts, expert_bytes, n_tokens, reference_of
from synthetic import write_tiny

from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.tensors import TensorIndex
from moeoffload.errors import CapacityError
from moeoffload.expert_server.store import ExpertStore, LayerKey
from moeoffload.host.session import OffloadedModel, open_model
from moeoffload.placement import ExpertTable

N_TOKENS = 24
WAIT_S = 100


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("mixtral", tmp_path_factory.mktemp("mixtral"), dtype=torch.float32)


@pytest.fixture
def address(server: RunningServer) -> Iterator[str]:
    """Of a server that nobody uses, neither before the test nor after it."""
    wait_until_left(server.address)
    yield server.address
    wait_until_left(server.address)
    assert stats(server.address).resident_bytes == 0


def generate(model: torch.nn.Module, first: int) -> list[int]:
    """Tokens after some that every tiny vocabulary has."""
    return n_tokens(model, (torch.arange(16) * 7 + first).remainder(200).add(5).unsqueeze(0), N_TOKENS)


def open_on(address: str, model: Path, dtype: str = "f32") -> OffloadedModel:
    """In float32, since the prompts are noise: in a short dtype their tokens hang on the order of additions."""
    return open_model(model, experts=[address], threads=1, model_dtype=dtype)


def local_tokens(model: Path) -> list[list[int]]:
    reference = local_model(model, dtype=torch.float32)
    return [generate(reference, first) for first in range(3)]


def generate_at_once(*models: OffloadedModel) -> list[list[list[int]]]:
    """What each model generates for three prompts while the others do so too."""

    def three(host: OffloadedModel) -> list[list[int]]:
        return [generate(host.model, first) for first in range(3)]

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(three, models, timeout=WAIT_S))


@pytest.mark.parametrize("same", [True, False], ids=["one model", "two models"])
def test_hosts_share_experts_of_one_model_only_and_generate_what_a_local_run_does(
    address: str, other_model: Path, same: bool
) -> None:
    models = (DEMO, DEMO if same else other_model)
    expected = [local_tokens(model) for model in models]
    assert (expected[0] == expected[1]) == same
    first, second = (open_on(address, model) for model in models)
    with second:
        with first:
            together = stats(address)
            resident = expert_bytes(second.checkpoint) + (0 if same else expert_bytes(first.checkpoint))
            assert (together.leases, together.resident_bytes) == (2, resident)
            assert generate_at_once(first, second) == expected
        wait_until(lambda: stats(address).leases == 1, "the end of one lease", CLEAN_TIMEOUT_S)
        assert stats(address).resident_bytes == expert_bytes(second.checkpoint), "the other host still uses them"
        assert generate(second.model, 0) == expected[1][0]


def test_the_same_model_in_another_dtype_has_experts_of_its_own(address: str) -> None:
    with open_on(address, DEMO, "bf16") as first, open_on(address, DEMO) as second:
        sizes = [expert_bytes(each.checkpoint) for each in (first, second)]
        assert stats(address).resident_bytes == sum(sizes) == 3 * sizes[0]
        assert generate(second.model, 0) == local_tokens(DEMO)[0]


# Says where the memory grows that all hosts' calls work in.
WATCHED = """
import sys, threading
from moeoffload.kernels.layer import LayerKernels
reserve = LayerKernels.reserve
def watched(self, *arguments):
    print("reserved in thread", threading.current_thread().name, file=sys.stderr, flush=True)
    reserve(self, *arguments)
LayerKernels.reserve = watched
"""


def test_a_host_that_attaches_moves_no_memory_under_the_calls_of_another(start_server: StartServer) -> None:
    server = start_server(patch=WATCHED)
    with open_on(server.address, DEMO) as first, open_on(server.address, DEMO, "bf16"):
        generate(first.model, 0)
    lines = [line for line in server.log_text.splitlines() if line.startswith("reserved in thread")]
    assert set(lines) == {"reserved in thread engine"}


PROMPT = torch.arange(5, 25).unsqueeze(0)
DEMO_BYTES = expert_bytes(Checkpoint.open(DEMO))


def run(model: Path, *servers: RunningServer) -> torch.Tensor:
    """Logits of a prompt, computed by a host that leaves before this returns."""
    addresses = [server.address for server in servers]
    with open_model(model, experts=addresses, threads=1, device="cpu") as offloaded, torch.inference_mode():
        logits: torch.Tensor = offloaded.model(PROMPT).logits
    wait_until_left(*addresses)
    return logits


def offered(server: RunningServer) -> int:
    with connected(server.address) as client:
        return client.describe(STEP_TIMEOUT_S).offered_bytes


@pytest.mark.parametrize("n_servers", [1, 2])
def test_the_next_host_with_the_same_part_reads_nothing(start_server: StartServer, n_servers: int) -> None:
    servers = [start_server("--memory-gib", "2") for _ in range(n_servers)]
    before = [offered(server) for server in servers]
    logits = run(DEMO, *servers)
    first = [stats(server.address) for server in servers]
    assert sum(each.warm_bytes for each in first) == sum(each.read_bytes for each in first) >= DEMO_BYTES
    assert [each.resident_bytes for each in first] == [0] * n_servers
    assert [offered(server) for server in servers] == before, "what is warm counts as free"
    assert torch.equal(run(DEMO, *servers), logits)
    assert [stats(server.address).read_bytes for server in servers] == [each.read_bytes for each in first]


def test_another_model_gets_the_memory_and_only_what_it_took_is_read_again(
    start_server: StartServer, tmp_path: Path
) -> None:
    other = write_tiny("mixtral", tmp_path, dtype=torch.float32)
    needed = expert_bytes(Checkpoint.open(other))
    server = start_server("--memory-gib", str((DEMO_BYTES + needed // 2) / (1 << 30)), "--batch-capacity", "1")
    logits = run(DEMO, server)
    run(other, server)
    after = stats(server.address)
    assert 0 < DEMO_BYTES + needed - after.warm_bytes < DEMO_BYTES
    again = DEMO_BYTES - (after.warm_bytes - needed)
    assert torch.equal(run(DEMO, server), logits)
    assert stats(server.address).read_bytes == after.read_bytes + again


def test_nothing_stays_where_it_is_switched_off(start_server: StartServer) -> None:
    server = start_server("--keep-warm", "off")
    for n_reads in (1, 2):
        run(DEMO, server)
        assert (stats(server.address).warm_bytes, stats(server.address).read_bytes) == (0, n_reads * DEMO_BYTES)


def test_a_file_that_has_changed_is_read_again_also_where_the_digest_does_not_look(
    start_server: StartServer, tmp_path: Path
) -> None:
    model = shutil.copytree(DEMO, tmp_path / "model")
    server = start_server("--model-root", str(tmp_path))
    digest = Checkpoint.open(model).digest
    before = run(model, server)
    for tensor in TensorIndex.open(model).values():
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


def begin_build(store: ExpertStore, key: LayerKey) -> Callable[[], None]:
    """Another thread reads experts of 60 bytes until the function that this returns is called."""
    begun, goes_on = threading.Event(), threading.Event()

    def build() -> Any:
        begun.set()
        assert goes_on.wait(STEP_TIMEOUT_S)
        return "others"

    builder = threading.Thread(target=store.acquire, args=(key, 60, build))
    builder.start()
    assert begun.wait(STEP_TIMEOUT_S)

    def end() -> None:
        goes_on.set()
        builder.join(STEP_TIMEOUT_S)

    return end


def test_experts_whose_build_ends_meanwhile_are_never_counted_as_free() -> None:
    store = ExpertStore(100)
    end = begin_build(store, LayerKey("model", "bf16", 0, (0,)))
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
    model, whole = reference_of(checkpoint, expert_format="int4"), all_experts(checkpoint).layers
    errors = []
    with connected(server.address) as client:
        for layers in (((), (), *whole[2:]), whole, whole):
            with contextlib.closing(client.attach(STEP_TIMEOUT_S)) as lease:
                told: Any = lambda loaded, total: None  # noqa: E731
                errors.append(lease.load(model, ExpertTable(layers), progress=told, timeout_s=STEP_TIMEOUT_S))
    last, some_warm, all_warm = errors
    assert some_warm is not None
    assert some_warm == all_warm
    assert some_warm[2:] == last


def test_a_host_with_experts_that_are_there_does_not_wait_for_those_of_another() -> None:
    store, found = ExpertStore(100), list[Any]()
    there, other = (LayerKey("model", "bf16", layer, (0,)) for layer in (0, 1))
    store.acquire(there, 10, lambda: "experts")  # type: ignore[arg-type,return-value]
    end = begin_build(store, other)
    asks = threading.Thread(target=lambda: found.append(store.acquire(there, 10, lambda: None)), daemon=True)  # type: ignore[arg-type,return-value]
    asks.start()
    asks.join(5)
    found_meanwhile = list(found)
    end()
    assert found_meanwhile == ["experts"]
