"""An error that nothing foresaw, in a thread that all hosts need, is told: open requests fail, health says so."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import torch
from conftest import DEMO, StartServer
from engine_kit import engine
from grpc_health.v1 import health_pb2, health_pb2_grpc
from test_fairness import BRIEF, LARGE, Engine, logging_host
from transport.ends import SIZES, SOON_S, OnDemand, echo, eventually, send

from moeoffload import open_model
from moeoffload.errors import DeadlineError, ServerError
from moeoffload.transport import SharedServerEnd, StreamKeys, StreamListener, open_channel
from moeoffload.wire import ErrorCode

__all__ = ["engine"]


class Unforeseen(BaseException):
    """Caught by no `except Exception`."""


def unforeseen(*_: Any) -> Any:
    raise Unforeseen("on purpose")


def test_when_the_compute_thread_fails_all_that_waits_and_all_that_comes_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    engine.on_failure = told.append
    host = logging_host(engine, "a", [])
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
    host = logging_host(engine, "a", [])

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
        slot = host.acquire(SOON_S)
        send(host, slot)
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


def is_out_of_service(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=SOON_S)
    return bool(reply.status == health_pb2.HealthCheckResponse.NOT_SERVING)


def test_a_server_that_fails_while_it_starts_says_so(start_server: StartServer) -> None:
    server = start_server(patch=FAILS_AT_ONCE)
    assert is_out_of_service(server.address)
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
    eventually(lambda: is_out_of_service(server.address))
    assert "on purpose" in server.log_text
    with pytest.raises(ServerError, match="this server has failed"):
        open_model(DEMO, experts=[server.address], transport=transport, device="cpu")
