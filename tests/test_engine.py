"""Bad frames, requests that nobody waits for, errors that nothing foresaw: each is told and hurts no other host."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any

import pytest
import torch
import zmq
from conftest import DEMO, StartServer, health_of
from engine_kit import engine, raw_exchange, set_field, set_slot, unspoilt
from test_fairness import BRIEF, LARGE, Engine, logging_hosts
from transport.ends import SIZES, SOON_S, OnDemand, begin, echo, eventually, send

from moeoffload import open_model
from moeoffload.errors import DeadlineError, ServerError
from moeoffload.transport import SharedServerEnd, StreamKeys, StreamListener, open_channel
from moeoffload.transport.stream import StreamHostEnd
from moeoffload.wire import ErrorCode

__all__ = ["engine"]

BAD_FRAMES: list[tuple[str, Any, ErrorCode, str]] = [
    ("more rows than the cap", set_field("rows", 65), ErrorCode.CAPACITY, "65 rows, at most 64"),
    ("2^32 - 1 rows", set_field("rows", 2**32 - 1), ErrorCode.CAPACITY, "rows"),
    ("no rows", set_field("rows", 0), ErrorCode.BAD_FRAME, ""),
    ("a body length that lies", set_field("body_bytes", 2**60), ErrorCode.BAD_FRAME, "body_bytes"),
    ("another top-k", set_field("top_k", 3), ErrorCode.BAD_FRAME, "top_k"),
    ("another payload dtype", set_field("dtype_out", 1), ErrorCode.BAD_FRAME, "dtype_out"),
    ("a kind that is no request", set_field("kind", 77), ErrorCode.BAD_FRAME, "kind"),
    ("a layer beyond the model", set_field("layer", 60_000), ErrorCode.BAD_FRAME, "layer"),
    ("an old epoch", set_field("epoch", 999_999), ErrorCode.BAD_FRAME, "epoch"),
    ("a slot beyond the table", set_slot(32), ErrorCode.BAD_SLOT, "slots"),
    ("a slot below -1", set_slot(-2), ErrorCode.BAD_SLOT, "slots"),
]


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_bad_frames_get_typed_errors_and_the_server_goes_on(three_servers: list[str], transport: str) -> None:
    prompt = torch.tensor([[7, 8, 9, 10]])
    with (
        open_model(DEMO, experts=three_servers[:1], device="cpu") as other,
        open_model(DEMO, experts=three_servers[:1], batch_capacity=64, transport=transport, device="cpu") as offloaded,
        torch.inference_mode(),
    ):
        expected = other.model(prompt).logits
        others = ("the epoch of another host", set_field("epoch", other.links[0]._epoch), ErrorCode.BAD_FRAME, "epoch")
        for name, change, code, words in (*BAD_FRAMES, others):
            got, text, _ = raw_exchange(offloaded.links[0], change)
            assert got == code, name
            assert words in text, name
            assert torch.equal(other.model(prompt).logits, expected)
        assert raw_exchange(offloaded.links[0], unspoilt)[:2] == (0, "")
        assert torch.equal(offloaded.model(prompt).logits, expected)


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_no_secret_of_a_host_is_in_logs_or_answers_that_others_see(start_server: StartServer, transport: str) -> None:
    server = start_server("--log-level", "debug")
    with (
        open_model(DEMO, experts=[server.address], transport=transport, device="cpu") as first,
        open_model(DEMO, experts=[server.address], transport=transport, device="cpu") as second,
    ):
        link, other = first.links[0], second.links[0]
        channel = link.channel
        secrets = [link.lease.lease_id]
        if isinstance(channel, StreamHostEnd):
            secrets.append(channel._wire.socket.getsockopt(zmq.ROUTING_ID).hex())  # type: ignore[union-attr]
        else:
            secrets += [channel._segment.name, channel.nonce.hex()]  # type: ignore[attr-defined]
        raw_exchange(other, set_field("epoch", link._epoch))
        seen = f"{other.client.stats(SOON_S)} {other.client.describe(SOON_S)} {server.log_text}"
        assert all(secret not in seen for secret in secrets)


@pytest.mark.parametrize("n_rows", [BRIEF, LARGE])
def test_a_request_whose_time_limit_passes_in_the_queue_is_not_computed(engine: Engine, n_rows: int) -> None:
    log, host = logging_hosts(engine, "a")
    for timeout_us in (1000, 60_000_000, 0):
        host.submit(n_rows, spoil=set_field("timeout_us", timeout_us))
    sleep(0.01)
    engine.start()
    engine.run(lambda: None, host.share, SOON_S)
    host.wait(3)
    assert [host.code_of(number) for number in range(3)] == [ErrorCode.TOO_LATE, 0, 0]
    assert log == [f"a{n_rows}"] * 2
    assert (engine.counters.skipped, engine.counters.errors) == (1, 0)


def test_a_request_that_its_host_has_cancelled_is_not_computed(engine: Engine) -> None:
    log, host = logging_hosts(engine, "a")
    host.submit(LARGE)
    host.submit(LARGE)
    host.channel.cancelled.add(0)
    engine.start()
    host.wait(2)
    assert [host.code_of(number) for number in range(2)] == [ErrorCode.TOO_LATE, 0]
    assert log == ["a64"]
    assert engine.counters.skipped == 1


def test_a_stop_while_another_thread_computes_is_not_forgotten(engine: Engine) -> None:
    engine.start()
    with engine._computing:
        engine._wake()
        sleep(0.1)  # the compute thread is awake now, and waits for the lock
        engine.stop(0)
    assert engine._thread is not None
    engine._thread.join(SOON_S)
    assert not engine._thread.is_alive()


class Unforeseen(BaseException):
    """Caught by no `except Exception`."""


def unforeseen(*_: Any) -> Any:
    raise Unforeseen("on purpose")


def test_when_the_compute_thread_fails_all_that_waits_and_all_that_comes_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    engine.on_failure = told.append
    _, host = logging_hosts(engine, "a")
    host.submit(LARGE)
    monkeypatch.setattr(engine, "_pick", unforeseen)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.run, lambda: None, host.share, SOON_S)
        eventually(lambda: len(host.share.large) == 2)
        engine.start()
        host.wait(1)
        with pytest.raises(ServerError, match="engine failed: Unforeseen: on purpose"):
            waiting.result(SOON_S)
    eventually(lambda: len(told) == 1)
    for n_rows in (BRIEF, LARGE):
        host.submit(n_rows)
        host.wait(1)
    assert [host.code_of(number) for number in range(3)] == [ErrorCode.INTERNAL] * 3


def test_when_the_gpu_has_failed_nothing_more_is_computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU raises once, as after an access outside of its memory, it raises for ever."""
    told: list[str] = []
    engine.on_failure = told.append
    _, host = logging_hosts(engine, "a")

    def broken(*_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine._answers, "_compute", broken)
    for number in range(2):
        host.submit(LARGE)
        if not number:
            engine.start()
        host.wait(1)
        eventually(lambda: len(told) == 1)
    assert [host.code_of(number) for number in range(2)] == [ErrorCode.INTERNAL] * 2
    assert "illegal memory access" in told[0]


def test_when_the_reader_of_a_shared_channel_fails_its_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    server = SharedServerEnd(SIZES, echo, on_failure=told.append)
    monkeypatch.setattr(server, "_take", unforeseen)
    with contextlib.closing(open_channel(server.offer, host="", timeout_s=SOON_S)) as host:
        slot, _ = begin(host)
        with pytest.raises(ServerError, match="closed") as caught:
            host.wait(slot, SOON_S)
        assert not isinstance(caught.value, DeadlineError)
        host.release(slot)
    eventually(lambda: len(told) == 1)
    server.close()


def test_when_the_reader_of_the_stream_fails_every_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    listener = StreamListener(on_failure=told.append)
    channels = [listener.open_channel(SIZES, OnDemand()) for _ in range(2)]
    hosts = [open_channel(channel.offer, host="127.0.0.1", timeout_s=SOON_S) for channel in channels]
    slots = [host.acquire(SOON_S) for host in hosts]
    send(hosts[0], slots[0])
    monkeypatch.setattr(listener, "_receive", unforeseen)
    send(hosts[1], slots[1])
    for host, slot in zip(hosts, slots, strict=True):
        with pytest.raises(ServerError, match="closed"):
            host.wait(slot, SOON_S)
        host.release(slot)
        host.close()
    eventually(lambda: len(told) == 1)
    listener.close()


def test_when_the_door_of_the_stream_fails_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    listener = StreamListener(encrypted=True, on_failure=told.append)
    keys = StreamKeys.new()
    channel = listener.open_channel(SIZES, echo, keys.public)
    monkeypatch.setattr(listener._door, "_decide", unforeseen)
    with pytest.raises(DeadlineError):
        open_channel(channel.offer, host="127.0.0.1", timeout_s=0.5, keys=keys)
    eventually(lambda: len(told) == 1)
    listener.close()


FAILS_LATER = """
from moeoffload.expert_server.engine import Engine
serve, n = Engine._serve_next, [0]
def counted(self, share):
    n[0] += share.small is not None and bool(share.small)
    if n[0] > 20:
        raise SystemError("on purpose")
    serve(self, share)
Engine._serve_next = counted
"""


FAILS_AT_ONCE = """
from moeoffload.transport import StreamListener
start = StreamListener.__init__
def started(self, *places, **options):
    start(self, *places, **options)
    self._reader.join()
def broken(self):
    raise SystemError("on purpose")
StreamListener.__init__, StreamListener._read = started, broken
"""


def test_a_server_that_fails_while_it_starts_says_so(start_server: StartServer) -> None:
    server = start_server(patch=FAILS_AT_ONCE)
    assert health_of(server.address) == "NOT_SERVING"
    with pytest.raises(ServerError, match="this server has failed: its thread stream-reader"):
        open_model(DEMO, experts=[server.address], device="cpu")


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_server_that_has_failed_says_so_to_hosts_and_to_health(start_server: StartServer, transport: str) -> None:
    server = start_server(patch=FAILS_LATER)
    with (
        open_model(DEMO, experts=[server.address], transport=transport, required=True, device="cpu") as offloaded,
        torch.inference_mode(),
    ):

        def generate() -> None:
            while True:
                offloaded.model(torch.tensor([[7]]))

        with pytest.raises(ServerError, match=r"has failed|closed"):
            generate()
    eventually(lambda: health_of(server.address) == "NOT_SERVING")
    assert "on purpose" in server.log_text
    with pytest.raises(ServerError, match="this server has failed"):
        open_model(DEMO, experts=[server.address], transport=transport, device="cpu")
