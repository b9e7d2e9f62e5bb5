"""What a server has room for: rows of one dispatch, hosts, leases; whatever is less than asked for is told."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import STEP_TIMEOUT_S
from conftest import DEMO, StartServer, connected
from models import all_experts, expert_bytes, reference_of, two_devices
from synthetic import write_tiny

from moeoffload import OffloadedModel, open_model
from moeoffload.checkpoint import Checkpoint
from moeoffload.control.client import ControlClient, Lease
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.devices import _cgroup_room
from moeoffload.errors import BusyError, CapacityError, ServerError
from moeoffload.expert_server.service import MAX_LEASES_OF_ONE
from moeoffload.expert_server.store import ExpertStore
from moeoffload.host.attach import retry_while_busy
from moeoffload.placement import ExpertTable, batch_row_bytes

SLOTS = 4
MODEL = Checkpoint.open(DEMO)
REFERENCE = reference_of(MODEL)
ROW_BYTES = batch_row_bytes(
    MODEL.hidden_size, MODEL.top_k, max(layer.intermediate for layer in MODEL.layers), MODEL.dtype.itemsize, SLOTS
)
ALL = all_experts(MODEL)


def budget_gib(n_rows: int) -> str:
    """Memory for all experts of the demo model and so many rows, as an option."""
    return str((expert_bytes(MODEL) + n_rows * ROW_BYTES) / (1 << 30))


def load(lease: Lease, table: ExpertTable = ALL) -> None:
    lease.load(REFERENCE, table, progress=lambda loaded, total: None, timeout_s=STEP_TIMEOUT_S)


def rows_of(lease: Lease) -> int:
    """The batch capacity that a lease gets, which has loaded all experts and asks for as many rows as it may."""
    dtype = REFERENCE.compute_dtype
    wishes = pb.Activate(
        model_digest=MODEL.digest, compute_dtype=dtype, table_digest=ALL.digest, hidden_size=MODEL.hidden_size,
        top_k=MODEL.top_k, dtype_out=dtype, dtype_back=dtype, batch_capacity=1024, n_slots=SLOTS, transport="stream",
    )  # fmt: skip
    return lease.activate(wishes).batch_capacity


def capacity_of(offloaded: OffloadedModel) -> int:
    return int(offloaded.report().servers[0]["batch_capacity"])


@pytest.mark.parametrize(
    ("option", "shared_bytes", "reason"),
    [
        (["--transport", "shared"], "100000", ""),  # which is a floor and cuts no batch
        (["--batch-capacity", "100"], None, "its own --batch-capacity"),
        (["--memory-gib", budget_gib(300)], None, "its memory has no room for more"),
    ],
    ids=["shared bytes", "capacity", "memory"],
)
def test_whatever_cuts_the_rows_of_a_dispatch_says_so(
    start_server: StartServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    option: list[str],
    shared_bytes: str | None,
    reason: str,
) -> None:
    if shared_bytes:
        monkeypatch.setenv("DFLASH_MOE_EXPERT_COMPUTE_IPC_SHARED_BYTES", shared_bytes)
    server = start_server(*option)
    with open_model(DEMO, experts=[server.address], slots=SLOTS, threads=1, device="cpu") as offloaded:
        rows = capacity_of(offloaded)
    told = [record.getMessage() for record in caplog.records if "rows instead of" in record.getMessage()]
    text = f"batch capacity is {rows} rows instead of 1024: "
    if not reason:
        assert (rows, told) == (1024, [])
        return
    assert rows == 100 or 150 < rows < 300
    assert told == [f"expert server {server.address}: {text}{reason}"]
    assert text in server.log_text


def test_a_second_host_finds_room_on_a_server_that_the_first_has_filled(start_server: StartServer) -> None:
    server = start_server("--memory-gib", budget_gib(300))
    prompt = torch.tensor([[7, 8, 9, 10]])
    with (
        open_model(DEMO, experts=[server.address], slots=SLOTS, device="cpu") as first,
        open_model(DEMO, experts=[server.address], slots=SLOTS, device="cpu") as second,
        torch.inference_mode(),
    ):
        assert 150 < capacity_of(first) < 300
        assert 32 <= capacity_of(second) <= 128
        assert torch.equal(first.model(prompt).logits, second.model(prompt).logits)


def what_is_free_takes_a_while_to_find_out() -> None:
    """In a server's process: so long that hosts that attach at the same moment have all asked before one goes on."""
    from moeoffload.expert_server import server

    def free_now(device: torch.device) -> int:
        time.sleep(0.02)
        return 1 << 40

    server.free_now = free_now


def test_hosts_that_attach_at_the_same_moment_get_no_more_than_there_is(start_server: StartServer) -> None:
    server = start_server("--memory-gib", budget_gib(300), patch=what_is_free_takes_a_while_to_find_out)
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        leases = [stack.enter_context(loaded(server.address))[1] for _ in range(3)]
        rows = list(pool.map(rows_of, leases))
    assert min(rows) > 0
    assert sum(rows) <= 300


def test_a_second_lease_of_a_process_that_finds_no_room_is_told_to_come_back(start_server: StartServer) -> None:
    server = start_server("--memory-gib", budget_gib(40))
    with contextlib.ExitStack() as stack:
        leases = [stack.enter_context(loaded(server.address))[1] for _ in range(3)]
        assert [rows_of(lease) for lease in leases[:2]] == [32, 8]
        with pytest.raises(BusyError, match="bytes are left for batches"):
            rows_of(leases[2])


@contextlib.contextmanager
def loaded(address: str) -> Iterator[tuple[ControlClient, Lease]]:
    """A lease that has loaded all experts."""
    with connected(address) as client, contextlib.closing(client.attach(STEP_TIMEOUT_S)) as lease:
        load(lease)
        yield client, lease


FAST = "--memory-gib", "0.003", "--ram-gib", "0.25"
"""Half of the experts, and all of them."""


def test_batches_of_all_hosts_fit_into_the_fast_tier_in_which_what_is_warm_makes_room(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server(*FAST)
    with loaded(server.address) as (client, one), loaded(server.address) as (_, other):
        rows = [rows_of(one), rows_of(other)]
        assert min(rows) > 0
        assert client.stats(STEP_TIMEOUT_S).tiers.fast_bytes + sum(rows) * ROW_BYTES <= 0.003 * 2**30
    with loaded(server.address) as (_, lease):
        with open_model(write_tiny("qwen3_moe", tmp_path), experts=[server.address], slots=1, device="cpu"):
            pass
        assert rows_of(lease) == rows[0]


def test_a_batch_is_counted_on_each_device(start_server: StartServer) -> None:
    server = start_server("--memory-gib", "0.05", patch=two_devices)
    with loaded(server.address) as (client, lease):
        rows, experts = rows_of(lease), client.stats(STEP_TIMEOUT_S).resident_bytes
        assert client.describe(STEP_TIMEOUT_S).offered_bytes <= 2 * 0.05 * 2**30 - experts - 2 * rows * ROW_BYTES


def test_a_load_that_finds_no_room_takes_none_and_may_be_tried_again(start_server: StartServer) -> None:
    half = ExpertTable(tuple(experts[: len(experts) // 2] for experts in ALL.layers))
    server = start_server("--memory-gib", str(0.75 * float(budget_gib(0))))
    with connected(server.address) as client, contextlib.closing(client.attach(STEP_TIMEOUT_S)) as lease:
        with pytest.raises(CapacityError, match="experts need"):
            load(lease)
        assert client.stats(STEP_TIMEOUT_S).resident_bytes == 0
        load(lease, half)
        assert client.stats(STEP_TIMEOUT_S).resident_bytes > 0


def test_a_host_waits_for_a_lease_to_come_free(start_server: StartServer) -> None:
    with connected(start_server().address) as client, contextlib.ExitStack() as stack:

        def attach() -> Lease:
            return stack.enter_context(contextlib.closing(client.attach(STEP_TIMEOUT_S)))

        first, *_ = [attach() for _ in range(MAX_LEASES_OF_ONE)]
        with pytest.raises(BusyError, match=f"{MAX_LEASES_OF_ONE} of this host") as caught:
            attach()
        assert caught.value.retry_after_s > 0
        with pytest.raises(BusyError):
            retry_while_busy(attach, caught.value.retry_after_s / 2)
        threading.Timer(0.2, first.close).start()
        retry_while_busy(attach, STEP_TIMEOUT_S)


def test_a_host_waits_for_another_to_leave(
    start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server("--memory-gib", budget_gib(40))
    first = open_model(DEMO, experts=[server.address], slots=SLOTS, device="cpu")
    threading.Timer(0.2, first.close).start()
    with open_model(write_tiny("qwen3_moe", tmp_path), experts=[server.address], device="cpu"):
        assert "no room for the experts: other hosts use 0.005859 GiB" in caplog.text


def test_a_host_waits_for_rows_that_others_took_while_it_loaded(start_server: StartServer) -> None:
    server = start_server("--memory-gib", budget_gib(40))
    with loaded(server.address) as (_, one), loaded(server.address) as (_, other):
        taken: list[int] = []

        def take_all(address: str, n_loaded: int, n_bytes: int) -> None:
            if not taken:
                taken.extend((rows_of(one), rows_of(other)))
                for lease in (one, other):
                    threading.Timer(0.2, lease.close).start()

        with open_model(DEMO, experts=[server.address], slots=SLOTS, device="cpu", on_progress=take_all) as offloaded:
            assert (taken, capacity_of(offloaded)) == ([32, 8], 32)


def test_it_is_not_asked_more_often_than_the_server_says() -> None:
    asked: list[float] = []

    def attempt() -> str:
        asked.append(time.monotonic())
        if len(asked) < 3:
            raise BusyError("full", 0.1)
        return "room"

    assert retry_while_busy(attempt, STEP_TIMEOUT_S) == "room"
    assert all(later - earlier >= 0.1 for earlier, later in itertools.pairwise(asked))


def test_the_budget_is_no_more_than_what_is_really_free() -> None:
    free = 1000
    store = ExpertStore(600, lambda: free)
    assert store.free_bytes == 600
    free = 100
    assert store.free_bytes == 100


@pytest.mark.parametrize("path", ["/", "/jobs/ours", "/../elsewhere"])
def test_the_limit_of_the_control_group_counts_without_what_can_be_dropped(path: str, tmp_path: Path) -> None:
    own, limited = tmp_path / "own", tmp_path / "groups" / ("jobs" if "jobs" in path else "")
    own.write_text(f"4:memory:/other\n0::{path}\n")
    (tmp_path / "groups" / "jobs" / "ours").mkdir(parents=True)

    def room() -> int:
        return _cgroup_room(tmp_path / "groups", own)

    assert room() > 1 << 60, "no such limit here"
    for name, text in (("memory.max", "1000"), ("memory.current", "900"), ("memory.stat", "anon 1\ninactive_file 200")):
        (limited / name).write_text(text + "\n")
    assert room() == 300
    (limited / "memory.max").write_text("max\n")
    assert room() > 1 << 60


def larger_calls_pay() -> None:
    """In a server's process: as on a GPU where a call of 2,048 rows takes less time for each row, others do not."""
    from moeoffload.expert_server import lease
    from moeoffload.expert_server.server_parts import ServerParts

    def timed(*arguments: Any, sizes: Sequence[int], **how: Any) -> list[tuple[int, float]]:
        return [(n, n * (0.9 if n == 2048 else 1.0) * 1e-6) for n in sizes]

    ServerParts.tries_larger_calls = property(lambda server: server.settings.batch_capacity is None)  # type: ignore[assignment,method-assign]
    lease.time_layer = timed  # type: ignore[assignment]


def larger_calls_pay_in_a_small_container() -> None:
    from moeoffload.expert_server import server_parts

    larger_calls_pay()
    server_parts.shared_room = lambda: 1 << 20


def test_little_shared_memory_is_not_filled_by_larger_calls(start_server: StartServer) -> None:
    for options, rows in (([], 1024), (["--transport", "stream"], 2048)):
        server = start_server(*options, patch=larger_calls_pay_in_a_small_container)
        with open_model(DEMO, experts=[server.address], slots=SLOTS, device="cpu") as offloaded:
            assert capacity_of(offloaded) == rows


def no_room_for_shared_memory() -> None:
    from moeoffload.transport import segment

    segment.shared_room = lambda: 1 << 16


def test_a_server_without_room_for_shared_memory_offers_the_stream(start_server: StartServer) -> None:
    server = start_server(patch=no_room_for_shared_memory)
    with open_model(DEMO, experts=[server.address], device="cpu") as offloaded:
        assert offloaded.report().servers[0]["transport"] == "stream"
    assert "transport shared is not offered: a shared-memory channel needs" in server.log_text
    with pytest.raises(ServerError, match="a shared-memory channel needs"):
        open_model(DEMO, experts=[server.address], transport="shared", device="cpu")


@pytest.mark.parametrize(
    ("options", "asked", "rows"),
    [
        ([], {}, 2048),
        ([], {"batch_capacity": 1500}, 1024),
        (["--batch-capacity", "3000"], {"batch_capacity": 4096}, 3000),  # as it was told to
        (["--memory-gib", budget_gib(1900)], {}, 1024),  # no room for 2,048
    ],
)
def test_a_server_offers_the_calls_that_pay(
    start_server: StartServer, caplog: pytest.LogCaptureFixture, options: list[str], asked: dict[str, Any], rows: int
) -> None:
    server = start_server(*options, patch=larger_calls_pay)
    for _ in range(2):
        with open_model(DEMO, experts=[server.address], slots=SLOTS, device="cpu", **asked) as offloaded:
            assert capacity_of(offloaded) == rows
            with connected(server.address) as client:
                free = client.describe(STEP_TIMEOUT_S).offered_bytes
        if not options:
            assert free == (2 << 30) - int(float(budget_gib(rows)) * (1 << 30)), "room that is not used is given back"
    told = [record.getMessage() for record in caplog.records if "rows instead of" in record.getMessage()]
    assert len(told) == (2 if asked else 0)
