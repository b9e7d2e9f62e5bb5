"""What waits for the same experts is computed as one batch: same bits, own errors, own share of time, no waiting."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import DEMO, StartServer, connected
from cpu_kernels.experts import gated_experts
from engine_kit import BF16, F16, F32, HIDDEN, N_EXPERTS, SOON_S, Host, raw_exchange, set_field, set_slot, unspoilt

from moeoffload import open_model
from moeoffload.expert_server.batcher import Batch
from moeoffload.expert_server.engine import Engine
from moeoffload.host.link import ExpertLink
from moeoffload.kernels import KernelInput, LayerKernels
from moeoffload.wire import ErrorCode, FrameHeader, Kind


class Server:
    """An engine with one layer's real experts; ``calls`` has the rows of every kernel call."""

    def __init__(self, **options: Any) -> None:
        self.engine = Engine(**options)
        experts = gated_experts(N_EXPERTS, HIDDEN, 32, torch.bfloat16)
        self.layer = LayerKernels(experts, self.engine.kernel_workspace, "tiled")
        self.calls: list[int] = []
        self.layers: Any = [self]
        self.n_experts, self.is_batch_invariant, self.shape = N_EXPERTS, True, None
        self.engine.start()

    def __call__(self, call: KernelInput, workspace: Any = None) -> None:
        self.calls.append(len(call.rows))
        self.layer(call, workspace)

    def in_slices(self, call: KernelInput, workspace: Any = None) -> Iterator[None]:
        self.calls.append(len(call.rows))
        yield from self.layer.in_slices(call, workspace)

    def hosts(self, *names: str, **options: Any) -> list[Host]:
        return [Host(self.engine, name, self.layers, **options) for name in names]

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Something else is computed until the block ends: what comes meanwhile waits."""
        share, goes_on, begun = self.engine.shares.join("busy"), threading.Event(), threading.Event()
        other = self.engine.shares.join("another")  # with which it took turns before

        def wait() -> None:
            begun.set()
            goes_on.wait(SOON_S)

        working = threading.Thread(target=self.engine.run, args=(wait, share, SOON_S))
        working.start()
        assert begun.wait(SOON_S)
        try:
            yield
        finally:
            goes_on.set()
            working.join(SOON_S)
            self.engine.leave(share)
            self.engine.leave(other)


@pytest.fixture
def make() -> Iterator[Callable[..., Server]]:
    """Makes servers that the end of the test stops."""
    with contextlib.ExitStack() as stack:

        def build(**options: Any) -> Server:
            server = Server(**options)
            stack.callback(server.engine.stop, SOON_S)
            return server

        yield build


def at_once(server: Server, *requests: Any, turns: Sequence[Host] = ()) -> list[tuple[torch.Tensor, FrameHeader]]:
    """What each request gets that was sent while something else was computed.

    A request is a host and the arguments of its ``send``; ``turns`` says whose turn is first then.
    """
    with server.busy():
        sent = [(host, host.send(*arguments)) for host, *arguments in requests]
        for turn, host in enumerate(turns):
            host.comes_at(turn)
    return [host.receive(number) for host, number in sent]


def test_what_waits_of_four_hosts_is_one_call_with_the_bits_of_four(make: Any) -> None:
    server = make()
    kinds = [(BF16, BF16, 4), (F32, F32, 3), (F16, BF16, 2), (BF16, F32, 1)]
    hosts = [Host(server.engine, str(i), server.layers, out, back) for i, (out, back, _) in enumerate(kinds)]
    rows = [n_rows for _, _, n_rows in kinds]
    alone = [host.alone(n_rows, seed) for seed, (host, n_rows) in enumerate(zip(hosts, rows, strict=True))]
    server.calls.clear()
    before = list(server.engine.counters.members)
    answers = at_once(server, *zip(hosts, rows, range(4), strict=True), turns=hosts)
    for (sums, header), expected in zip(answers, alone, strict=True):
        assert torch.equal(sums, expected)
        assert header.queue_us > 0
    assert server.calls == [sum(rows)]
    counters = server.engine.counters
    assert [now - then for now, then in zip(counters.members, before, strict=True)] == [0, 0, 0, 1, 0, 0]
    assert counters.requests == 8
    assert counters.rows == 2 * sum(rows)


def bad_slot(header: FrameHeader, views: Any) -> None:
    views.slots[0, 0] = N_EXPERTS


def not_finite(header: FrameHeader, views: Any) -> None:
    views.rows[0, 3] = float("inf")


@pytest.mark.parametrize(
    ("spoil", "code"),
    [(bad_slot, ErrorCode.BAD_SLOT), (set_field("epoch", 7), ErrorCode.BAD_FRAME), (not_finite, ErrorCode.PAYLOAD)],
    ids=["slot", "epoch", "not finite"],
)
@pytest.mark.parametrize("at", [0, 2])
def test_an_error_in_one_of_four_fails_only_that_one(make: Any, spoil: Any, code: ErrorCode, at: int) -> None:
    server = make()
    hosts = server.hosts(*"abcd")
    alone = [host.alone(2, seed) for seed, host in enumerate(hosts)]
    answers = at_once(server, *((host, 2, i, spoil if i == at else unspoilt) for i, host in enumerate(hosts)))
    for i, (sums, header) in enumerate(answers):
        if i == at:
            assert (header.kind, header.code) == (Kind.ERROR, code)
        else:
            assert torch.equal(sums, alone[i])
    assert server.engine.counters.errors == 1


def test_a_lease_that_ends_while_it_waits_takes_nobody_with_it(make: Any) -> None:
    server = make()
    hosts = server.hosts(*"abcd")
    alone = [host.alone(1, seed) for seed, host in enumerate(hosts)]
    with server.busy():
        for i, host in enumerate(hosts):
            host.send(1, i)
        hosts[0].active.closed = True
    for i in range(1, 4):
        assert torch.equal(hosts[i].receive(1)[0], alone[i])


def test_other_experts_are_another_call_and_coalescing_can_be_off(make: Any) -> None:
    for coalesce in (True, False):
        server, other = make(coalesce=coalesce), make()
        hosts = [*server.hosts("a", "b"), Host(server.engine, "c", other.layers)]
        answers = at_once(server, *((host, 1, 5) for host in hosts))
        assert [header.kind for _, header in answers] == [Kind.COMBINE] * 3
        assert server.calls == ([2] if coalesce else [1, 1])
        assert other.calls == [1]


def test_a_kernel_that_rounds_by_company_computes_alone(make: Any) -> None:
    server = make()
    server.is_batch_invariant = False
    hosts = server.hosts("a", "b")
    at_once(server, *((host, 1, 5) for host in hosts))
    assert server.calls == [1, 1]


def test_a_batch_that_is_done_keeps_no_experts_and_no_request() -> None:
    class Held:
        weights_dtype, header, is_small = torch.float32, SimpleNamespace(rows=1), True

    experts, request = Held(), Held()
    batch = Batch()
    batch.begin(request, experts)  # type: ignore[arg-type]
    held = [weakref.ref(experts), weakref.ref(request)]
    del experts, request
    batch.clear()
    assert [each() for each in held] == [None, None]


def test_a_batch_stays_within_its_first_members_memory(make: Any) -> None:
    server = make()
    (host,) = server.hosts("a", capacity=4)
    answers = at_once(server, *((host, n_rows, 1) for n_rows in (1, 2, 2, 1, 3)))
    assert [header.kind for _, header in answers] == [Kind.COMBINE] * 5
    assert server.calls == [4, 2, 3]


@pytest.mark.parametrize(
    ("waiting", "first", "calls"),
    [((64, 10, 3, 1, 1), "quiet", [1, 15, 64]), ((3, 1), "quiet", [2, 3]), ((16,), "other", [16, 1])],
    ids=["many wait", "few wait", "a call of many rows is first"],
)
def test_a_host_joins_anothers_decode_step_with_no_more_rows_than_that(
    make: Any, waiting: tuple[int, ...], first: str, calls: list[int]
) -> None:
    server = make()
    quiet, other = server.hosts("quiet", "other")
    quiet.alone(1, 0)
    other.alone(1, 0)
    server.calls.clear()
    requests = [(other, n_rows, 1) for n_rows in waiting] + [(quiet, 1, 2)]
    answers = at_once(server, *requests, turns=(quiet, other) if first == "quiet" else (other, quiet))
    assert all(header.kind == Kind.COMBINE for _, header in answers)
    assert server.calls[0] == calls[0]
    assert sorted(server.calls[1:]) == calls[1:]


@pytest.mark.parametrize(("senders", "n_rows"), [("aaaa", 1), ("ab", 90)], ids=["one host", "two hosts"])
def test_what_is_alike_is_one_call(make: Any, senders: str, n_rows: int) -> None:
    server = make()
    named = {name: server.hosts(name, capacity=200)[0] for name in set(senders)}
    hosts = [named[name] for name in senders]
    alone = [host.alone(n_rows, seed) for seed, host in enumerate(hosts)]
    server.calls.clear()
    answers = at_once(server, *((host, n_rows, seed) for seed, host in enumerate(hosts)))
    assert all(torch.equal(sums, expected) for (sums, _), expected in zip(answers, alone, strict=True))
    assert server.calls == [len(senders) * n_rows]


def test_each_host_pays_for_its_rows(make: Any) -> None:
    server = make()
    one, three = server.hosts("one", "three")
    for host in (one, three):
        host.alone(1, 0)
    at_once(server, (one, 1, 1), (three, 3, 2), turns=(three, one))
    books = server.engine.shares.join("books")
    server.engine.run(lambda: None, books, SOON_S)  # they are written after the replies
    assert server.calls[-1] == 4
    assert 0 < three.share.used_s == pytest.approx(3 * (one.share.used_s - 1), rel=0.01)


def hammer(link: ExpertLink, n_times: int, bad: bool) -> list[tuple[int, torch.Tensor]]:
    """Sends the same row so many times, one after the other; the error codes and sums that came back."""
    answers = (raw_exchange(link, set_slot(30_000) if bad else unspoilt) for _ in range(n_times))
    return [(code, sums) for code, _, sums in answers]


SLOW = """
import time
from moeoffload.kernels.layer import LayerKernels
compute = LayerKernels.__call__
def slowly(*arguments):
    time.sleep(20e-3)
    compute(*arguments)
LayerKernels.__call__ = slowly
"""


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_four_clients_of_a_slow_server_share_its_calls(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Each has two requests in flight: while some are computed, slowly, the others of the eight come together."""
    n_each = 20
    server = start_server(patch=SLOW)
    with connected(server.address) as client, contextlib.ExitStack() as stack:
        links = []
        for name in "abcd":
            monkeypatch.setattr("socket.gethostname", lambda name=name: name)
            opened = open_model(DEMO, experts=[server.address], transport=transport, device="cpu")
            links.append(stack.enter_context(opened).links[0])
        expected = hammer(links[0], 1, bad=False)[0][1]
        before = client.stats(SOON_S)
        with ThreadPoolExecutor(8) as pool:
            good = list(pool.map(lambda link: hammer(link, n_each, bad=False), links * 2))
        after = client.stats(SOON_S)
        with ThreadPoolExecutor(8) as pool:
            mixed = list(pool.map(lambda link: hammer(link, n_each, bad=link is links[1]), links * 2))
        final = client.stats(SOON_S)
    assert all(code == 0 and torch.equal(sums, expected) for answers in good for code, sums in answers)
    n_batches = after.batches.batches - before.batches.batches
    assert after.requests - before.requests == 8 * n_each
    assert sum(after.batches.by_members) == after.batches.batches
    assert 8 * n_each / n_batches > 1.5
    assert final.errors - after.errors == 2 * n_each
    for link, answers in zip(links * 2, mixed, strict=True):
        if link is links[1]:
            assert {code for code, _ in answers} == {ErrorCode.BAD_SLOT}
        else:
            assert all(code == 0 and torch.equal(sums, expected) for code, sums in answers)
