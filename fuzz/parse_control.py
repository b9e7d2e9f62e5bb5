"""Messages of the control plane: requests into the servicer of a real expert server, replies into the host's checks."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf.message import DecodeError
from synthetic import write_tiny
from transformers.utils import logging as transformers_logging

from moeoffload.checkpoint import Checkpoint
from moeoffload.config import Address, ExpertServerSettings
from moeoffload.control.protocol import PROTOCOL_VERSION
from moeoffload.control.status import abort
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.validate import checked_items, checked_parameters, checked_timings, clean_texts
from moeoffload.errors import DeadlineError, MoeOffloadError
from moeoffload.expert_server.server import ExpertServer
from moeoffload.expert_server.service import ExpertService
from moeoffload.placement import ExpertTable
from moeoffload.transport import ChannelOffer, ChannelSizes, open_channel, stream

LEASE = "L" * 32
"""Stands for the id of the open lease, which is a secret."""
METHODS: tuple[tuple[str, Any], ...] = (
    ("Describe", pb.DescribeRequest),
    ("Stats", pb.StatsRequest),
    ("Drain", pb.DrainRequest),
    ("Calibrate", pb.CalibrateRequest),
    ("LoadExperts", pb.LoadExpertsRequest),
    ("Attach", pb.AttachRequest),
    ("DescribeReply", pb.DescribeReply),
    ("Offer", pb.Offer),
)
_FAMILY = "qwen3_moe"


class _AbortedError(Exception):
    """What a context raises when a call is refused."""


class _Context:
    """A call's context, without a call."""

    def peer(self) -> str:
        """Where the call comes from."""
        return "ipv4:127.0.0.1:1"

    def set_trailing_metadata(self, metadata: object) -> None:
        """Takes it."""

    def cancel(self) -> None:
        """Nothing runs beside."""

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        """Checks what the peer would read."""
        if not details.isprintable() or len(details) > 500:
            raise AssertionError(f"details that are not one short line: {details!r}")
        raise _AbortedError


class _Unreachable:
    """Takes the place of the end that would connect somewhere."""

    def __init__(self, *arguments: object) -> None:
        raise DeadlineError("no answer")


def _split(data: bytes) -> list[bytes]:
    """Any bytes as messages with a length of two bytes before each."""
    parts: list[bytes] = []
    at = 0
    while at < len(data) and len(parts) < 8:
        length = int.from_bytes(data[at : at + 2], "little")
        parts.append(data[at + 2 : at + 2 + length])
        at += 2 + length
    return parts


class _Plane:
    def __init__(self, folder: Path) -> None:
        logging.disable(logging.CRITICAL)
        transformers_logging.disable_progress_bar()
        os.environ["HF_HUB_OFFLINE"] = "1"
        model = write_tiny(_FAMILY, folder / "model", dtype=torch.bfloat16)
        settings = ExpertServerSettings(
            listen=Address.parse("127.0.0.1:0", lowest_port=0),
            device="cpu",
            memory_gib=0.05,
            model=str(model),
            batch_capacity=8,
            threads=1,
        )
        self._server = ExpertServer(settings)
        self._servicer = ExpertService(self._server.parts, lambda: None, first_s=5, step_s=5)
        stream.StreamHostEnd = _Unreachable  # type: ignore[misc, assignment]

    def call(self, number: int, data: bytes) -> None:
        """One call, or one reply."""
        name, kind = METHODS[number % len(METHODS)]
        try:
            if name == "Attach":
                self._attach([kind.FromString(part) for part in _split(data)])
            elif name in ("DescribeReply", "Offer"):
                self._reply(kind.FromString(data))
            else:
                self._call(name, kind.FromString(data))
        except (DecodeError, _AbortedError):
            pass
        self._servicer._draining = False
        store = self._server.parts.store
        if self._servicer._leases or store.resident_bytes or store._reserved_bytes:
            raise AssertionError("something of a host that has gone is still there")

    def _call(self, name: str, request: Any) -> None:
        if getattr(request, "lease_id", "") != LEASE:
            self._finish(name, request)
            return
        lease = self._servicer.open_lease(pb.Hello(host="fuzz"), "fuzz", lambda message: None)
        request.lease_id = lease.lease_id
        try:
            self._finish(name, request)
        finally:
            self._servicer.close_lease(lease, "done")

    def _finish(self, name: str, request: Any) -> None:
        """Makes a call, reads all its replies, and turns its error into a status as the server does."""
        context: Any = _Context()
        try:
            result = getattr(self._servicer, name)(request, context)
            if isinstance(result, Iterator):
                for _ in result:
                    pass
        except MoeOffloadError as error:
            abort(context, error)

    def _attach(self, steps: list[Any]) -> None:
        """A stream of steps; experts are loaded after the welcome, as the model and the table of the server are."""
        context: Any = _Context()
        try:
            replies: Any = self._servicer.Attach(iter(steps), context)
            with contextlib.closing(replies):
                for reply in replies:
                    if reply.WhichOneof("step") == "welcome":
                        checkpoint = Checkpoint.open(self._server.parts.settings.model or "", dtype=torch.bfloat16)
                        self._finish("LoadExperts", _load(checkpoint, reply.welcome.lease_id))
        except MoeOffloadError as error:
            abort(context, error)

    def _reply(self, reply: Any) -> None:
        clean_texts(reply)
        try:
            if isinstance(reply, pb.DescribeReply):
                checked_items("transports", len(reply.transports))
                return
            checked_timings(reply.timings)
            checked_items("channels", len(reply.channels))
            for channel in reply.channels:
                sizes = ChannelSizes(channel.n_slots, channel.request_bytes, channel.reply_bytes)
                offer = ChannelOffer(channel.transport, sizes, checked_parameters(channel))
                open_channel(offer, host="127.0.0.1", timeout_s=0).close()
        except MoeOffloadError:
            pass


def _load(checkpoint: Checkpoint, lease_id: str) -> pb.LoadExpertsRequest:
    layers = [pb.LayerExperts(layer=layer.index, experts=[0, 1]) for layer in checkpoint.layers]
    model = pb.ModelReference(reference="any", digest=checkpoint.digest, compute_dtype="bf16")
    return pb.LoadExpertsRequest(lease_id=lease_id, model=model, layers=layers)


def make() -> Callable[[bytes], None]:
    """The function to be fuzzed."""
    plane = _Plane(Path(tempfile.mkdtemp(prefix="moeoffload-fuzz-")))

    def one_input(data: bytes) -> None:
        if data:
            plane.call(data[0], data[1:])

    return one_input


def seeds() -> dict[str, bytes]:
    """Inputs made of real messages."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint.open(write_tiny(_FAMILY, Path(folder), dtype=torch.bfloat16))
        digest, hidden, top_k = checkpoint.digest, checkpoint.hidden_size, checkpoint.top_k
        load = _load(checkpoint, LEASE)
    table = ExpertTable(tuple((0, 1) for _ in load.layers))
    activate = pb.Activate(
        model_digest=digest,
        compute_dtype="bf16",
        table_digest=table.digest,
        hidden_size=hidden,
        top_k=top_k,
        dtype_out="bf16",
        dtype_back="f16",
        batch_capacity=4,
        n_slots=2,
        transport="auto",
        shared_bytes=1 << 20,
    )
    steps = [
        pb.AttachRequest(hello=pb.Hello(protocol_version=PROTOCOL_VERSION, host="me:1", host_version="1")),
        pb.AttachRequest(activate=activate),
        pb.AttachRequest(accept=pb.Accept(transport="stream", reason="as the setting says")),
    ]
    attach = b"".join(len(step).to_bytes(2, "little") + step for step in (each.SerializeToString() for each in steps))
    describe = pb.DescribeReply(protocol_version=1, device="cpu", transports=["shared", "stream"], batch_capacity=8)
    offer = pb.Offer(batch_capacity=4, kernel="tiled", timings=[pb.Timing(rows=1, seconds=1e-5)])
    name = f"/moeoffload-7-{'0' * 32}"
    for transport, parameters in (
        ("shared", {"segment": name}),
        ("stream", {"port": "7", "routing_id": "6d" * 32}),
    ):
        offer.channels.add(transport=transport, n_slots=2, request_bytes=4096, reply_bytes=4096, parameters=parameters)
    messages: dict[int, bytes] = {
        0: pb.DescribeRequest(model_digest=digest, compute_dtype="bf16").SerializeToString(),
        2: b"",
        3: pb.CalibrateRequest(lease_id=LEASE, model=load.model).SerializeToString(),
        4: load.SerializeToString(),
        5: attach,
        6: describe.SerializeToString(),
        7: offer.SerializeToString(),
    }
    return {METHODS[number][0].lower(): bytes([number]) + message for number, message in messages.items()}
