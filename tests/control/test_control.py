"""The control plane of a real server: health, reflection, draining, and refusals that leave it serving."""

from __future__ import annotations

import contextlib
import queue
import runpy
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from command_lines import CLEAN_TIMEOUT_S, STEP_TIMEOUT_S, shm_names, wait_until
from conftest import DEMO, READY_TIMEOUT_S, ROOT, RunningServer, StartServer, connected, health_of, wait_until_left
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from models import all_experts, expert_bytes, next_logits, reference_of

from moeoffload.checkpoint import Checkpoint
from moeoffload.control.client import ControlClient
from moeoffload.control.credentials import HostCredentials
from moeoffload.control.protocol import MAX_STREAMS, PROTOCOL_VERSION
from moeoffload.control.server import SERVICE_NAME
from moeoffload.control.status import RETRY_AFTER
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.errors import ServerError
from moeoffload.expert_server.service import MAX_LEASES, MAX_LEASES_OF_ONE
from moeoffload.host.session import open_model

MODEL = Checkpoint.open(DEMO)
DTYPE = MODEL.dtype_label
ALL = all_experts(MODEL)


class RawHost:
    """A host that says what it likes: one Attach stream and plain calls beside it."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._outgoing: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        self._stream = self.call("Attach", iter(self._outgoing.get, None))

    def call(self, method: str, request: Any) -> Any:
        def begin(stub: Any, metadata: Any) -> Any:
            return getattr(stub, method)(request, timeout=STEP_TIMEOUT_S, metadata=metadata)

        return self._client._begin(begin)

    def send(self, **step: Any) -> pb.AttachReply:
        self._outgoing.put(pb.AttachRequest(**step))
        reply: pb.AttachReply = next(self._stream)
        return reply

    def hello(self, name: str = "test") -> str:
        return self.send(hello=pb.Hello(protocol_version=PROTOCOL_VERSION, host=name)).welcome.lease_id

    def load(self, request: pb.LoadExpertsRequest) -> list[pb.LoadProgress]:
        return list(self.call("LoadExperts", request))

    def describe(self) -> pb.DescribeReply:
        return self._client.describe(STEP_TIMEOUT_S)

    def stats(self) -> pb.StatsReply:
        return self._client.stats(STEP_TIMEOUT_S)

    def close(self) -> None:
        self._outgoing.put(None)


@contextlib.contextmanager
def raw_host(address: str) -> Iterator[RawHost]:
    with connected(address) as client, contextlib.closing(RawHost(client)) as host:
        yield host


@contextlib.contextmanager
def refused(server: RunningServer, *words: str) -> Iterator[None]:
    """The call inside is refused with all of ``words`` and no traceback; the server then has all its memory back."""
    with raw_host(server.address) as other:
        before = other.describe()
        with pytest.raises(grpc.RpcError) as caught:
            yield
        error: Any = caught.value
        details = error.details()
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION, details
        assert "\n" not in details
        assert all(word in details for word in words), details
        wait_until(lambda: other.stats().leases == 0, "the end of the lease", CLEAN_TIMEOUT_S)
        wait_until(lambda: other.describe() == before, "the server as it was", CLEAN_TIMEOUT_S)
    assert "Traceback" not in server.log_text
    assert not [name for name in shm_names() if f"moeoffload-{server.process.pid}-" in name]


def load_request(lease_id: str) -> pb.LoadExpertsRequest:
    layers = [pb.LayerExperts(layer=i, experts=experts) for i, experts in enumerate(ALL.layers)]
    return pb.LoadExpertsRequest(lease_id=lease_id, model=reference_of(MODEL), layers=layers)


def activate_request(**changes: object) -> pb.Activate:
    right: dict[str, Any] = {
        "model_digest": MODEL.digest, "compute_dtype": DTYPE, "table_digest": ALL.digest,
        "hidden_size": MODEL.hidden_size, "top_k": MODEL.top_k, "dtype_out": DTYPE, "dtype_back": DTYPE,
        "batch_capacity": 64, "n_slots": 4, "transport": "auto",
    }  # fmt: skip
    return pb.Activate(**right | changes)


def test_generated_code_is_that_of_the_proto_file(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "proto" / "generate.py"))
    script["generate"](tmp_path)
    made = {file.name: file.read_text() for file in tmp_path.iterdir()}
    committed = {file.name: file.read_text() for file in script["OUTPUT"].glob("expert_service_pb2*")}
    assert made == committed, "run make proto"


def test_health_says_serving_for_the_server_and_the_service_and_watch_is_not_offered(server: RunningServer) -> None:
    """With Watch a peer without a token would keep a connection for ever."""
    assert health_of(server.address, "") == health_of(server.address, SERVICE_NAME) == "SERVING"
    with grpc.insecure_channel(server.address) as channel:
        request = health_pb2.HealthCheckRequest(service="x" * 1000)
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
            next(health_pb2_grpc.HealthStub(channel).Watch(request, timeout=STEP_TIMEOUT_S))


def test_reflection_lists_the_services(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        shown = HostCredentials().metadata(server.address)
        (reply,) = stub.ServerReflectionInfo(requests, timeout=STEP_TIMEOUT_S, metadata=shown)
    names = {service.name for service in reply.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names


def test_calls_that_are_no_message_keep_no_stream(server: RunningServer) -> None:
    """Of each method more of them than a connection has streams, then a good one over the same connection."""
    service = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name
    reflect, describe = f"/{service}/ServerReflectionInfo", f"/{SERVICE_NAME}/Describe"
    shown = HostCredentials().metadata(server.address)
    with grpc.insecure_channel(server.address) as channel:
        for method in (reflect, describe):
            call = channel.stream_stream(method, None, None)
            for _ in range(MAX_STREAMS + 8):
                with pytest.raises(grpc.RpcError) as caught:
                    list(call(iter([b"\xff\xff"]), timeout=STEP_TIMEOUT_S, metadata=shown))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        assert list(stub.ServerReflectionInfo(iter([request]), timeout=STEP_TIMEOUT_S, metadata=shown))


def test_describe_and_stats_follow_a_host_from_load_to_leave(server: RunningServer) -> None:
    n_bytes = expert_bytes(MODEL)
    with raw_host(server.address) as watcher:
        free = watcher.describe()
        assert (free.protocol_version, free.device, free.draining) == (PROTOCOL_VERSION, "cpu", False)
        assert set(free.transports) == {"shared", "stream"}
        assert free.offered_bytes == 2 << 30
        assert (free.resident_bytes, watcher.stats().leases) == (0, 0)
        with raw_host(server.address) as host:
            steps = host.load(load_request(host.hello()))
            assert [step.loaded_bytes for step in steps] == sorted(step.loaded_bytes for step in steps)
            assert steps[-1].loaded_bytes == steps[-1].total_bytes == n_bytes
            assert steps[-1].table_digest == ALL.digest
            loaded = watcher.describe()
            assert loaded.resident_bytes == watcher.stats().resident_bytes == n_bytes
            assert loaded.offered_bytes == free.offered_bytes - n_bytes
            again = watcher.call("Describe", pb.DescribeRequest(model_digest=MODEL.digest, compute_dtype=DTYPE))
            assert again.offered_bytes == free.offered_bytes, "experts of the same model are shared"
            offer = host.send(activate=activate_request()).offer
            assert offer.batch_capacity == 64
            assert [channel.transport for channel in offer.channels] == ["shared", "stream"]
            assert watcher.describe().offered_bytes < loaded.offered_bytes, "room for batches is taken"
            assert watcher.stats().leases == 1
        wait_until(lambda: watcher.stats().leases == 0, "the end of the lease", CLEAN_TIMEOUT_S)
        wait_until(lambda: watcher.describe() == free, "the server as it was", CLEAN_TIMEOUT_S)


def test_draining_keeps_attached_hosts_refuses_new_ones_and_ends_with_the_last(start_server: StartServer) -> None:
    server = start_server()
    with connected(server.address) as client:
        with open_model(DEMO, experts=[server.address], threads=1, required=True) as model:
            before = next_logits(model)
            assert client.drain(STEP_TIMEOUT_S) == 1
            assert health_of(server.address, "") == health_of(server.address, SERVICE_NAME) == "NOT_SERVING"
            with pytest.raises(ServerError, match=f"{server.address}: .*draining"):
                open_model(DEMO, experts=[server.address], threads=1, connect_timeout_s=5.0)
            with raw_host(server.address) as other, pytest.raises(grpc.RpcError, match="draining"):
                other.hello()
            assert torch.equal(next_logits(model), before)
            assert server.process.poll() is None
        assert server.process.wait(READY_TIMEOUT_S) == 0
    assert "Traceback" not in server.log_text


def test_a_server_without_hosts_ends_when_drained_and_one_that_stops_tells_its_hosts(start_server: StartServer) -> None:
    drained, stopped = start_server(), start_server()
    with raw_host(drained.address) as host:
        assert host.call("Drain", pb.DrainRequest()).leases == 0
        assert drained.process.wait(READY_TIMEOUT_S) == 0
    with connected(stopped.address) as client:
        lease = client.attach(STEP_TIMEOUT_S)
        stopped.process.send_signal(signal.SIGINT)
        assert lease.why_ended(STEP_TIMEOUT_S) == f"expert server {stopped.address}: the server is stopping"
        assert stopped.process.wait(READY_TIMEOUT_S) == 0


def test_one_lease_more_than_the_limits_is_told_to_come_back(server: RunningServer) -> None:
    with contextlib.ExitStack() as stack:

        def refuse(name: str, words: str) -> None:
            with raw_host(server.address) as one_more, pytest.raises(grpc.RpcError, match=words) as caught:
                one_more.hello(name)
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(error.trailing_metadata())[RETRY_AFTER]) > 0

        for _ in range(MAX_LEASES_OF_ONE):
            stack.enter_context(raw_host(server.address)).hello("first")
        refuse("first", f"{MAX_LEASES_OF_ONE} of this host")
        for _ in range(MAX_LEASES - MAX_LEASES_OF_ONE):
            stack.enter_context(raw_host(server.address)).hello("second")
        refuse("third", f"{MAX_LEASES} leases, 0 of this host")
    wait_until_left(server.address)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("empty", ["expected hello"]),
        ("activate", ["expected hello"]),
        ("hello hello", ["attach step hello is not expected"]),
        ("other-version", ["version is 7 ", f"speaks {PROTOCOL_VERSION}"]),
        ("hello activate", ["before the experts were loaded"]),
        ("hello accept", ["'shared' was not offered"]),
        ("hello load activate activate", ["active already"]),
        ("hello load activate accept", ["does not see this server's memory"]),
    ],
)
def test_steps_that_come_too_early_twice_or_without_proof_are_refused(
    server: RunningServer, steps: str, words: list[str]
) -> None:
    lease_id = ""
    with refused(server, *words), raw_host(server.address) as host:
        for step in steps.split():
            if step == "hello":
                lease_id = host.hello()
            elif step == "load":
                host.load(load_request(lease_id))
            elif step == "activate":
                host.send(activate=activate_request())
            elif step == "accept":
                host.send(accept=pb.Accept(transport="shared", nonce=b"guess"))
            elif step == "other-version":
                host.send(hello=pb.Hello(protocol_version=7))
            else:
                host.send()


def test_activate_after_a_load_that_failed_is_refused(start_server: StartServer) -> None:
    server = start_server("--memory-gib", "0.002")
    with refused(server, "before the experts were loaded"), raw_host(server.address) as host:
        request = load_request(host.hello())
        with pytest.raises(grpc.RpcError, match=r"(?s)RESOURCE_EXHAUSTED.*this server has .* GiB left"):
            host.load(request)
        host.send(activate=activate_request())


Change = Callable[[pb.LoadExpertsRequest], None]


def layers(*held: tuple[int, list[int]]) -> Change:
    """Asks for these experts of these layers."""

    def change(request: pb.LoadExpertsRequest) -> None:
        del request.layers[:]
        request.layers.extend(pb.LayerExperts(layer=layer, experts=experts) for layer, experts in held)

    return change


def model(**values: str) -> Change:
    """Names another model."""

    def change(request: pb.LoadExpertsRequest) -> None:
        for name, value in values.items():
            setattr(request.model, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda request: request.ClearField("lease_id"), ["no such lease"]),
        (lambda request: request.MergeFrom(pb.LoadExpertsRequest(lease_id="0" * 32)), ["no such lease"]),
        (lambda request: request.MergeFrom(pb.LoadExpertsRequest(lease_id="\N{SNOWMAN}")), ["no such lease"]),
        (model(reference="/no/such/folder"), ["/no/such/folder"]),
        (model(reference=""), ["config.json"]),
        (model(reference="\0"), []),
        (model(digest=""), ["model digest"]),
        (model(digest="0" * 64), ["model digest is 000000000000 (host)"]),
        (model(compute_dtype="int7"), ["compute dtype", "int7", "bf16"]),
        (model(compute_dtype=""), ["compute dtype"]),
        (layers(), ["expert table"]),
        (layers((0, [0])), ["expert table"]),
        (layers((0, [0]), (1, [0]), (2, [0]), (3, [0]), (4, [0])), ["expert table"]),
        (layers((0, [0]), (2, [0]), (1, [0]), (3, [0])), ["expert table"]),
        (layers((0, [0, 1, 0]), (1, []), (2, []), (3, [])), ["expert table"]),
        (layers((0, [32]), (1, []), (2, []), (3, [])), ["expert table"]),
        (layers((0, []), (1, []), (2, []), (3, [2**32 - 1])), ["expert table"]),
    ],
)
def test_what_cannot_be_loaded_is_refused(server: RunningServer, change: Any, words: list[str]) -> None:
    with refused(server, *words), raw_host(server.address) as host:
        request = load_request(host.hello())
        change(request)
        host.load(request)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 0}, ["hidden size is 0 (host), 128 here"]),
        ({"hidden_size": 2**32 - 1}, ["hidden size"]),
        ({"top_k": 0}, ["top-k is 0 (host), 4 here"]),
        ({"model_digest": "0" * 64}, ["model digest"]),
        ({"table_digest": ""}, ["expert table"]),
        ({"compute_dtype": "f32"}, ["compute dtype is f32 (host), bf16 here"]),
        ({"dtype_out": "int7"}, ["payload dtype out", "int7"]),
        ({"dtype_back": ""}, ["payload dtype back"]),
        ({"batch_capacity": 0}, ["batch capacity is 0"]),
        ({"n_slots": 0}, ["slots"]),
        ({"transport": "pigeon"}, ["transport is pigeon", "shared, stream"]),
        ({"transport": ""}, ["transport"]),
    ],
    ids=str,
)
def test_an_activate_that_differs_is_refused_with_the_name_of_the_field(
    server: RunningServer, changes: dict[str, object], words: list[str]
) -> None:
    with refused(server, *words), raw_host(server.address) as host:
        host.load(load_request(host.hello()))
        host.send(activate=activate_request(**changes))


def test_absurdly_large_wishes_are_cut_to_what_the_server_allows(server: RunningServer) -> None:
    with raw_host(server.address) as host:
        limits = host.describe()
        host.load(load_request(host.hello()))
        wish = activate_request(batch_capacity=2**31, n_slots=2**32 - 1)
        offer = host.send(activate=wish).offer
        assert 1 <= offer.batch_capacity <= limits.batch_capacity
        assert {channel.n_slots for channel in offer.channels} == {limits.max_slots}
    wait_until_left(server.address)


def test_after_all_of_this_the_server_still_serves(server: RunningServer) -> None:
    with open_model(DEMO, experts=[server.address], threads=1) as model:
        assert torch.isfinite(next_logits(model)).all()
    assert "Traceback" not in server.log_text


def test_closing_a_client_ends_its_wait_for_a_server() -> None:
    client = ControlClient("127.0.0.1:1")  # where nobody listens
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(client.connect, 10 * STEP_TIMEOUT_S)
        client.close()
        with pytest.raises(ServerError, match="is closed"):
            connecting.result(STEP_TIMEOUT_S)
