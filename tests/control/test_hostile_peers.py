"""Peers that mean harm on the control plane hold no threads, forge no lines and put nothing into others' hands."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from conftest import DEMO, StartServer, connected
from fuzz_frames import HTTP2_CALL
from google.protobuf.message import Message
from models import reference_of

from moeoffload.checkpoint import Checkpoint
from moeoffload.control.client import ControlClient
from moeoffload.control.credentials import ServerCredentials
from moeoffload.control.protocol import PROTOCOL_VERSION
from moeoffload.control.server import MOST_CALLS, ControlServer
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.v1 import expert_service_pb2_grpc as pb_grpc
from moeoffload.control.validate import checked_parameters, checked_timings, clean_texts
from moeoffload.errors import ProtocolError, ServerError
from moeoffload.expert_server.service import ExpertService
from moeoffload.logs import Refusals
from moeoffload.placement import ExpertTable

SOON_S = 10.0
SERVICE = "/moeoffload.v1.ExpertService"


class FakeLease:
    """A lease whose load lasts until it is told to end."""

    lease_id = "1"

    def __init__(self) -> None:
        self.call: grpc.ServicerContext | None = None
        self.called_until = float("-inf")
        self.closed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.goes_on = threading.Event()

    def load(self, request: pb.LoadExpertsRequest) -> Iterator[pb.LoadProgress]:
        yield pb.LoadProgress(total_bytes=1)
        assert self.goes_on.wait(SOON_S)

    def activate(self, request: pb.Activate) -> pb.Offer:
        assert self.goes_on.wait(SOON_S)
        return pb.Offer()

    def accept(self, request: pb.Accept) -> pb.Ready:
        return pb.Ready(epoch=1)

    def close(self, reason: str) -> None:
        self.closed.put(reason)


class FakeService(ExpertService):
    """The expert service without a server: every host gets the same lease."""

    def __init__(self, first_s: float = 60, step_s: float = 60) -> None:
        nothing: Any = None
        super().__init__(nothing, lambda: None, first_s, step_s)
        self.lease: Any = FakeLease()
        self.hellos: list[pb.Hello] = []
        self.port = 0

    def open_lease(self, hello: pb.Hello, peer: str, say: Callable[[pb.AttachReply], None]) -> Any:
        self.hellos.append(hello)
        return self.lease

    def find_lease(self, lease_id: str) -> Any:
        return self.lease

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeReply:
        return pb.DescribeReply(protocol_version=PROTOCOL_VERSION)


Serve = Callable[..., tuple[grpc.Channel, FakeService]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A listening control plane with short patience and a service that does nothing."""
    with contextlib.ExitStack() as stack:

        def start(first_s: float = 60, step_s: float = 60) -> tuple[grpc.Channel, FakeService]:
            backend = FakeService(first_s, step_s)
            control = ControlServer("127.0.0.1", 0, backend, ServerCredentials(), Refusals(), first_s=first_s)
            stack.callback(control.stop, 0)
            backend.port = control.port
            return stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{control.port}")), backend

        yield start


def silent() -> Iterator[bytes]:
    """Requests that never come; ends with the test."""
    time.sleep(SOON_S * 6)
    yield b""


def raw_call(channel: grpc.Channel, method: str, requests: Iterator[bytes], timeout: float | None = None) -> Any:
    """Sends bytes as the requests of a method."""
    return channel.stream_stream(f"{SERVICE}/{method}", None, None)(requests, timeout=timeout)


def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert isinstance(caught.value, grpc.Call)
    return caught.value.code()


def stub_of(channel: grpc.Channel) -> Any:
    return pb_grpc.ExpertServiceStub(channel)  # type: ignore[no-untyped-call]


def attach(channel: grpc.Channel, timeout: float) -> tuple[Any, queue.SimpleQueue[pb.AttachRequest | None]]:
    """A call that was welcomed, and what its host says further."""
    outgoing: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
    call = stub_of(channel).Attach(iter(outgoing.get, None), timeout=timeout)
    outgoing.put(pb.AttachRequest(hello=pb.Hello(protocol_version=PROTOCOL_VERSION)))
    assert next(call).welcome.lease_id == "1"
    return call, outgoing


def describe(channel: grpc.Channel) -> pb.DescribeReply:
    reply: pb.DescribeReply = channel.unary_unary(f"{SERVICE}/Describe", None, pb.DescribeReply.FromString)(
        b"", timeout=SOON_S
    )
    return reply


@pytest.mark.parametrize("method", ["Attach", "Describe", "LoadExperts", "Calibrate"])
def test_a_call_that_says_nothing_is_ended(serve: Serve, method: str) -> None:
    channel, _ = serve(first_s=0.2)
    # On the wire a peer that sends no more than the head of a call looks like this, also where one request is expected.
    call = raw_call(channel, method, silent(), timeout=SOON_S)
    assert code_of(call) is grpc.StatusCode.FAILED_PRECONDITION


def test_a_reflection_call_that_says_nothing_is_ended(serve: Serve) -> None:
    channel, _ = serve(first_s=0.2)
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    call = channel.stream_stream(method, None, None)(silent(), timeout=SOON_S)
    assert code_of(call) is grpc.StatusCode.FAILED_PRECONDITION


def test_calls_that_say_nothing_hold_few_threads_for_a_short_time(serve: Serve) -> None:
    channel, backend = serve(first_s=1)
    before = threading.active_count()
    calls = [raw_call(channel, "Attach", silent()) for _ in range(2 * MOST_CALLS)]
    ours = len(calls) + 1  # of this test: one per call that it makes with requests that never come
    assert threading.active_count() <= before + ours + 2 * MOST_CALLS
    own_connection = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(f"127.0.0.1:{backend.port}", own_connection) as another:
        assert describe(another).protocol_version == PROTOCOL_VERSION
    for call in calls:
        code_of(call)


def test_a_host_that_does_not_go_on_attaching_loses_its_lease(serve: Serve) -> None:
    channel, backend = serve(step_s=0.2)
    call, _ = attach(channel, SOON_S)
    assert code_of(call) is grpc.StatusCode.FAILED_PRECONDITION
    assert "more than 0.2 s for a step" in backend.lease.closed.get(timeout=SOON_S)


class CallEndsAsTimeIsUp:
    """The events of a stream whose first wait is over just as the load ends; the next step comes after that."""

    def __init__(self, service: FakeService) -> None:
        self._service = service
        self._waits = 0

    def get(self, timeout: float) -> pb.AttachRequest:
        self._waits += 1
        if self._waits == 1:
            self._service.lease.goes_on.set()
            context: Any = None
            list(self._service.LoadExperts(pb.LoadExpertsRequest(lease_id="1"), context))
            raise queue.Empty
        return pb.AttachRequest(activate=pb.Activate())


def test_the_time_for_a_step_begins_when_the_hosts_call_has_ended() -> None:
    service = FakeService()
    events: Any = CallEndsAsTimeIsUp(service)
    event: Any = service._next_event(events, service.lease, ready=False)
    assert event.WhichOneof("step") == "activate"


def test_a_path_that_is_no_text_ends_neither_the_server_nor_a_lease(serve: Serve) -> None:
    """gRPC's accepting task ends at such a path; every further call would wait for ever."""
    channel, backend = serve()
    port = backend.port
    call, outgoing = attach(channel, 60)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), timeout=SOON_S) as connection:
            connection.sendall(HTTP2_CALL.replace(b"/Stats", b"/\xff\xfe\xfd\xfc\xfb"))
            time.sleep(0.2)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as another:
            grpc.channel_ready_future(another).result(SOON_S)
            assert describe(another).protocol_version == PROTOCOL_VERSION
    backend.lease.goes_on.set()
    outgoing.put(pb.AttachRequest(activate=pb.Activate()))
    assert next(call).WhichOneof("step") == "offer"
    outgoing.put(None)
    assert list(call) == []


def test_an_attached_host_and_one_that_loads_may_be_silent(serve: Serve) -> None:
    channel, backend = serve(first_s=0.3, step_s=0.3)

    def patience_is_over() -> None:
        """Returns when another call that began now has been silent for too long."""
        assert code_of(raw_call(channel, "Attach", silent())) is grpc.StatusCode.FAILED_PRECONDITION

    call, outgoing = attach(channel, 60)
    load = stub_of(channel).LoadExperts(pb.LoadExpertsRequest(lease_id="1"), timeout=60)
    assert next(load).total_bytes == 1
    patience_is_over()
    backend.lease.goes_on.set()
    assert list(load) == []
    outgoing.put(pb.AttachRequest(activate=pb.Activate()))
    assert next(call).WhichOneof("step") == "offer"
    outgoing.put(pb.AttachRequest(accept=pb.Accept()))
    assert next(call).ready.epoch == 1
    patience_is_over()
    outgoing.put(None)
    assert list(call) == []
    assert backend.lease.closed.get(timeout=SOON_S) == "the host ended the lease"


def test_a_second_call_of_a_lease_beside_the_first_is_refused(serve: Serve) -> None:
    channel, backend = serve()
    request = pb.LoadExpertsRequest(lease_id="1")
    load = stub_of(channel).LoadExperts(request, timeout=SOON_S)
    next(load)
    assert code_of(stub_of(channel).LoadExperts(request, timeout=SOON_S)) is grpc.StatusCode.FAILED_PRECONDITION
    backend.lease.goes_on.set()
    assert list(load) == []


def test_a_flood_of_steps_ends_the_attach_and_is_not_kept(serve: Serve) -> None:
    channel, backend = serve()
    n_taken = 0

    def flood() -> Iterator[pb.AttachRequest]:
        nonlocal n_taken
        yield pb.AttachRequest(hello=pb.Hello(protocol_version=PROTOCOL_VERSION))
        for n_taken in range(1000):
            yield pb.AttachRequest(activate=pb.Activate(transport="x" * 1_000_000))

    call = stub_of(channel).Attach(flood(), timeout=SOON_S)
    next(call)
    time.sleep(0.5)
    backend.lease.goes_on.set()
    assert code_of(call) is grpc.StatusCode.INVALID_ARGUMENT
    assert n_taken < 100, "what is not read holds the sender back"


@pytest.mark.parametrize("method", ["Describe", "Stats", "Drain", "Calibrate", "LoadExperts", "Attach"])
def test_bytes_that_are_no_message_are_refused_in_one_line(
    serve: Serve, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    channel, _ = serve()
    call = raw_call(channel, method, iter([b"\xff\xff\xff\xff"]), timeout=SOON_S)
    assert code_of(call) is grpc.StatusCode.INVALID_ARGUMENT
    assert "4 bytes that are no message" in (call.details() or "")
    assert "Traceback" not in caplog.text


def test_names_of_a_host_forge_no_lines_of_the_log(serve: Serve) -> None:
    channel, backend = serve()
    hello = pb.Hello(
        protocol_version=PROTOCOL_VERSION, host="me\nERROR forged\x1b[2J\u202e" + "x" * 9999, host_version="1\r2"
    )
    list(stub_of(channel).Attach(iter([pb.AttachRequest(hello=hello)]), timeout=SOON_S))
    kept = backend.hellos[0]
    assert kept.host.startswith("me ERROR forged?[2J?xxx")
    assert (len(kept.host), kept.host_version) == (128, "1 2")


def test_a_lease_cannot_store_experts_under_the_name_of_another_model(start_server: StartServer) -> None:
    server = start_server()
    checkpoint = Checkpoint.open(DEMO)
    model = reference_of(checkpoint)
    table = ExpertTable(tuple((0,) for _ in checkpoint.layers))
    with connected(server.address) as client:
        lease = client.attach(SOON_S * 3)
        assert lease.calibrate(model, SOON_S * 3)
        model.digest = "0" * 64
        with pytest.raises(ServerError, match="model digest"):
            lease.load(model, table, progress=lambda loaded, total: None, timeout_s=SOON_S * 3)
        lease.close()
        assert client.stats(SOON_S).resident_bytes == 0


def test_a_server_that_answers_what_nobody_asked_ends_the_lease(serve: Serve) -> None:
    class Flooding(pb_grpc.ExpertServiceServicer):
        def Attach(self, requests: Iterator[pb.AttachRequest], context: grpc.ServicerContext) -> Iterator[Message]:
            yield pb.AttachReply(welcome=pb.Welcome(lease_id="1\n2"))
            while context.is_active():
                yield pb.AttachReply(ready=pb.Ready(epoch=1))

    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_ExpertServiceServicer_to_server(Flooding(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with contextlib.closing(ControlClient(f"127.0.0.1:{port}")) as client:
        lease = client.attach(SOON_S)
        assert lease.lease_id == "1 2"
        assert "were not asked for" in (lease.why_ended(SOON_S) or "")
    server.stop(0).wait(SOON_S)


@pytest.mark.parametrize("call", ["connect", "describe", "attach", "stats", "drain"])
def test_a_call_on_a_connection_that_was_closed_meanwhile_is_an_error(call: str) -> None:
    """gRPC ends the process when one is begun there."""
    client = ControlClient("127.0.0.1:9")
    client.close()
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9: the connection to it is closed"):
        getattr(client, call)(SOON_S)


@pytest.mark.parametrize(
    "timing", [(0, 1.0), (1, 0.0), (1, -1.0), (1, float("nan")), (1, float("inf")), (1, 1e300)], ids=str
)
def test_timings_that_are_none_are_refused(timing: tuple[int, float]) -> None:
    good = pb.Timing(rows=1, seconds=1e-5)
    assert checked_timings([good]) == [(1, 1e-5)]
    with pytest.raises(ProtocolError, match="timing"):
        checked_timings([good, pb.Timing(rows=timing[0], seconds=timing[1])])
    with pytest.raises(ProtocolError, match="timings"):
        checked_timings([good] * 100)


def test_parameters_of_a_channel_are_bounded() -> None:
    with pytest.raises(ProtocolError, match="2000 characters"):
        checked_parameters(pb.ChannelOffer(parameters={"segment": "x" * 2000}))
    with pytest.raises(ProtocolError, match="100 channel parameters"):
        checked_parameters(pb.ChannelOffer(parameters={str(n): "" for n in range(100)}))
    reply = pb.DescribeReply(device_name="a\nb", transports=["shared"], batch_capacity=7)
    clean_texts(reply)
    assert reply == pb.DescribeReply(device_name="a b", transports=["shared"], batch_capacity=7)
