"""Two hosts on one server: neither can speak for the other, see its frames or use its lease."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import zmq
from command_lines import STEP_TIMEOUT_S, shm_names
from conftest import DEMO, StartServer

from moeoffload import OffloadedModel, open_model
from moeoffload.control.credentials import HostCredentials
from moeoffload.control.protocol import dtype_label
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.v1 import expert_service_pb2_grpc as pb_grpc
from moeoffload.errors import ServerError
from moeoffload.host.link import ExpertLink
from moeoffload.transport import ChannelOffer, open_shared
from moeoffload.transport.stream import StreamHostEnd, open_stream
from moeoffload.transport.zmq_socket import TAG
from moeoffload.wire import HEADER_BYTES, ErrorCode, FrameHeader, Kind, read_error_text

PROMPT = torch.tensor([[7, 8, 9, 10]])


@contextlib.contextmanager
def two_hosts(address: str, transport: str) -> Iterator[tuple[OffloadedModel, OffloadedModel, torch.Tensor]]:
    """Two hosts and the logits of `PROMPT`; afterwards the first still gets the same ones."""
    with (
        open_model(DEMO, experts=[address], transport=transport, device="cpu") as first,
        open_model(DEMO, experts=[address], transport=transport, device="cpu") as second,
        torch.inference_mode(),
    ):
        logits = first.model(PROMPT).logits
        assert torch.equal(second.model(PROMPT).logits, logits)
        yield first, second, logits
        assert torch.equal(first.model(PROMPT).logits, logits)


def exchange(link: ExpertLink, **changes: int) -> tuple[int, str]:
    """Sends a dispatch of one row whose header has ``changes``; the code of the error that comes back, and its text."""
    channel, layout = link._channel, link.layout
    slot = channel.acquire(STEP_TIMEOUT_S)
    try:
        views = layout.dispatch_views(slot.request, 1)
        views.rows.zero_()
        views.weights.zero_()
        views.slots.zero_()
        body = layout.dispatch_body_bytes(1)
        header = FrameHeader(
            Kind.DISPATCH, layout.dtype_out, layout.dtype_back, channel.next_id(slot), link._epoch,
            top_k=layout.top_k, rows=1, body_bytes=body,
        )  # fmt: skip
        for name, value in changes.items():
            setattr(header, name, value)
        header.pack_into(slot.request)
        channel.send(slot, HEADER_BYTES + body)
        channel.wait(slot, STEP_TIMEOUT_S)
        header.unpack_from(slot.reply)
        return header.code, read_error_text(slot.reply, header.body_bytes)
    finally:
        channel.release(slot)


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_frame_with_the_epoch_of_another_host_is_refused(three_servers: list[str], transport: str) -> None:
    with two_hosts(three_servers[0], transport) as (first, second, _):
        code, text = exchange(second.links[0], epoch=first.links[0]._epoch)
        assert code == ErrorCode.BAD_FRAME
        assert "epoch" in text
        assert exchange(second.links[0])[0] == 0


def test_no_cancel_frame_ends_what_another_host_has_sent(three_servers: list[str]) -> None:
    with two_hosts(three_servers[0], "stream") as (first, second, _):
        code, _ = exchange(second.links[0], kind=Kind.CANCEL, epoch=first.links[0]._epoch)
        assert code == ErrorCode.BAD_FRAME


def test_the_segment_of_an_attached_host_has_no_name(three_servers: list[str]) -> None:
    with two_hosts(three_servers[0], "shared") as (first, _, _):
        channel = first.links[0]._channel
        name = channel._segment.name  # type: ignore[attr-defined]
        assert not [found for found in shm_names() if name.strip("/") in found]
        with pytest.raises(ServerError, match="not on this host"):
            open_shared(ChannelOffer("shared", channel.sizes, {"segment": name}))


def test_who_does_not_know_a_routing_id_gets_no_answer_and_disturbs_nobody(three_servers: list[str]) -> None:
    with two_hosts(three_servers[0], "stream") as (first, _, _):
        channel = first.links[0]._channel
        assert isinstance(channel, StreamHostEnd)
        port = channel._endpoint.rpartition(":")[2]
        context = zmq.Context()
        try:
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(channel._endpoint)
            frame = bytearray(HEADER_BYTES)
            FrameHeader(Kind.PING, request_id=99).pack_into(memoryview(frame))
            for _ in range(100):
                dealer.send_multipart([TAG.pack(99, 0, HEADER_BYTES), bytes(frame)])
            assert dealer.poll(500) == 0, "an answer to a stranger"
        finally:
            context.destroy(0)
        guessed = ChannelOffer("stream", channel.sizes, {"port": port, "routing_id": (b"m" + bytes(31)).hex()})
        with pytest.raises(ServerError):
            open_stream(guessed, "127.0.0.1", timeout_s=0.5)


@pytest.mark.parametrize("lease_id", ["", "0" * 32, "../../x"])
def test_calls_with_a_lease_that_is_not_ones_own_are_refused(three_servers: list[str], lease_id: str) -> None:
    import grpc

    channel = HostCredentials().channel(three_servers[0], [])
    with two_hosts(three_servers[0], "shared") as (first, _, _), channel:
        stub = pb_grpc.ExpertServiceStub(channel)  # type: ignore[no-untyped-call]
        about = first.checkpoint
        model = pb.ModelReference(reference=str(DEMO), digest=about.digest, compute_dtype=dtype_label(about.dtype))
        with pytest.raises(grpc.RpcError, match="no such lease"):
            stub.Calibrate(pb.CalibrateRequest(lease_id=lease_id, model=model), timeout=STEP_TIMEOUT_S)
        with pytest.raises(grpc.RpcError, match="no such lease"):
            list(stub.LoadExperts(pb.LoadExpertsRequest(lease_id=lease_id, model=model), timeout=STEP_TIMEOUT_S))


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_no_secret_of_a_host_is_in_logs_or_answers_that_others_see(start_server: StartServer, transport: str) -> None:
    server = start_server("--log-level", "debug")
    with two_hosts(server.address, transport) as (first, second, _):
        link = first.links[0]
        channel = link._channel
        secrets = [link._lease.lease_id]
        if isinstance(channel, StreamHostEnd):
            secrets.append(channel._wire.socket.getsockopt(zmq.ROUTING_ID).hex())  # type: ignore[union-attr]
        else:
            secrets += [channel._segment.name, channel.nonce.hex()]  # type: ignore[attr-defined]
        exchange(second.links[0], epoch=link._epoch)
        client = second.links[0]._client
        seen = f"{client.stats(STEP_TIMEOUT_S)} {client.describe(STEP_TIMEOUT_S)} {server.log_text}"
        assert all(secret not in seen for secret in secrets)
