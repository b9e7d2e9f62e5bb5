"""Connects to one expert server: describe, lease, load, agree, open the channel."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import torch

from moeoffload.checkpoint import Checkpoint
from moeoffload.config import Address, HostSettings, is_loopback
from moeoffload.config.shared import USUAL_ROWS
from moeoffload.control.client import ControlClient, Lease
from moeoffload.control.credentials import HostCredentials
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.validate import MAX_NAME, checked_items, checked_parameters, checked_timings
from moeoffload.errors import BusyError, ServerError
from moeoffload.host.link import Deadlines, ExpertLink, LinkInfo
from moeoffload.payload import Payloads
from moeoffload.placement import ExpertTable
from moeoffload.text import one_line
from moeoffload.transport import ChannelOffer, ChannelSizes, HostChannel, StreamKeys, open_channel
from moeoffload.wire import FrameLayout

logger = logging.getLogger(__name__)

LEAST_WAIT_S: Final = 0.05
OnProgress = Callable[[str, int, int], None]
"""Called with a server's address, its loaded bytes and its total bytes; from several threads, one at a time."""
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Candidate:
    """A server that answered: its address, its control client and its reply to Describe."""

    address: str
    credentials: HostCredentials | None
    client: ControlClient
    info: pb.DescribeReply


@dataclass(frozen=True)
class AttachPlan:
    """What is the same for all servers of a run."""

    checkpoint: Checkpoint
    reference: str
    """The model's folder or file as an absolute path, or its hub id."""
    revision: str | None
    payloads: Payloads
    settings: HostSettings
    device: torch.device
    on_progress: OnProgress | None
    telling: threading.Lock = field(default_factory=threading.Lock)

    @property
    def model(self) -> pb.ModelReference:
        """The description of the model that servers get."""
        return pb.ModelReference(
            reference=self.reference,
            revision=self.revision or "",
            digest=self.checkpoint.digest,
            compute_dtype=self.checkpoint.dtype_label,
            expert_format=self.checkpoint.expert_format or "",
            config=self.checkpoint.config_text,
        )

    def tell(self, address: str, loaded: int, total: int) -> None:
        """Calls ``on_progress``."""
        if self.on_progress is not None:
            with self.telling:
                self.on_progress(address, loaded, total)


def connect(
    address: str,
    checkpoint: Checkpoint,
    timeout_s: float,
    credentials: HostCredentials | None = None,
    refused_s: float | None = None,
    client: ControlClient | None = None,
) -> Candidate:
    """Connects to the server at ``address``, with a new ``client`` unless one is given, and asks what it offers for
    this model; ``refused_s`` as in `ControlClient.connect`.
    Raises ServerError: it cannot be reached, or speaks another protocol version."""
    client = client or ControlClient(address, credentials)
    try:
        client.connect(timeout_s, refused_s)
        return Candidate(address, credentials, client, describe(client, checkpoint, timeout_s))
    except BaseException:
        client.close()
        raise


def describe(client: ControlClient, checkpoint: Checkpoint, timeout_s: float) -> pb.DescribeReply:
    """Asks a server what it offers for this model. Raises ServerError as `ControlClient.describe` does."""
    return client.describe(timeout_s, model_digest=checkpoint.digest, compute_dtype=checkpoint.dtype_label)


def retry_while_busy(attempt: Callable[[], _Result], timeout_s: float) -> _Result:
    """Returns the result of ``attempt()``, which is retried while it raises BusyError, until ``timeout_s`` seconds
    after the first one. Raises BusyError: no room became free in time; and whatever else ``attempt`` raises."""
    deadline = math.inf
    while True:
        try:
            return attempt()
        except BusyError as error:
            wait_s, now = max(error.retry_after_s, LEAST_WAIT_S), time.monotonic()
            deadline = min(deadline, now + timeout_s)
            if now + wait_s >= deadline:
                raise
            logger.warning("%s; trying again in %.3g s", error, wait_s)
            time.sleep(wait_s)


def attach(candidate: Candidate, table: ExpertTable, plan: AttachPlan, *, kernel: str, timeout_s: float) -> ExpertLink:
    """Takes a lease on a server, loads the experts of ``table`` and opens the channel.

    ``kernel`` is the kernel that the server must use, since another holder of ``table`` uses it, or this one did
    before; empty accepts any.
    Waits up to ``timeout_s`` seconds while the server has no room.
    Raises ServerError: the server refuses or fails; nothing is left open, the connection neither.
    """
    checkpoint, settings = plan.checkpoint, plan.settings
    keys = StreamKeys.new()
    wishes = pb.Activate(
        model_digest=checkpoint.digest,
        compute_dtype=checkpoint.dtype_label,
        table_digest=table.digest,
        hidden_size=checkpoint.hidden_size,
        top_k=checkpoint.top_k,
        dtype_out=plan.payloads.out.label,
        dtype_back=plan.payloads.back.label,
        batch_capacity=settings.most_rows,
        n_slots=settings.slots,
        transport=settings.transport,
        kernel=kernel,
        stream_key=keys.public,
    )

    def load() -> tuple[Lease, list[float] | None, pb.Offer]:
        lease = candidate.client.attach(timeout_s)
        try:
            errors = lease.load(
                plan.model,
                table,
                progress=lambda loaded, total: plan.tell(candidate.address, loaded, total),
                timeout_s=settings.load_timeout_s,
            )
            return lease, errors, lease.activate(wishes)
        except BaseException:
            lease.close()  # a host that waits for room takes none
            raise

    with contextlib.ExitStack() as undo:
        undo.callback(candidate.client.close)
        lease, errors, offer = retry_while_busy(load, timeout_s)
        undo.callback(lease.close)
        _check_capacity(candidate, offer.batch_capacity, settings)
        layout = FrameLayout(checkpoint.hidden_size, checkpoint.top_k, *plan.payloads, offer.batch_capacity)
        timings = checked_timings(offer.timings)
        checked_items("channels", len(offer.channels))
        channel, reason = _open_channel(candidate, offer, layout, settings, keys)
        undo.callback(channel.close)
        epoch = lease.accept(channel.name, channel.nonce, reason)
        info = LinkInfo(
            address=candidate.address,
            device=candidate.info.device,
            device_name=candidate.info.device_name,
            transport=channel.name,
            transport_reason=reason,
            kernel=one_line(offer.kernel, MAX_NAME),
            n_experts=table.n_experts,
            resident_bytes=table.n_bytes([layer.expert_bytes for layer in checkpoint.layers]),
            weight_errors=errors,
        )
        logger.info("expert server %s: %s (%s)", info.address, info.transport, reason)
        deadlines = Deadlines(settings.dispatch_floor_s, settings.dispatch_timeout_s, len(channel.slots), timings)
        n_experts = [layer.n_experts for layer in checkpoint.layers]
        link = ExpertLink(
            info, candidate.client, lease, channel, layout, epoch, table, n_experts, plan.device, deadlines
        )
        undo.pop_all()
    return link


def _check_capacity(candidate: Candidate, capacity: int, settings: HostSettings) -> None:
    """Logs why a server takes fewer rows than usual. Raises ServerError: it takes more than this host asked for."""
    if capacity > settings.most_rows:
        raise ServerError(
            f"expert server {candidate.address}: batch capacity is {capacity} there, "
            f"this host asked for at most {settings.most_rows}"
        )
    if capacity >= settings.usual_rows:
        return
    why = "its memory has no room for more"
    if capacity == candidate.info.batch_capacity:
        why = "its own --batch-capacity"
    elif capacity >= USUAL_ROWS:
        why = f"{why}, or larger calls are no faster there"
    logger.warning(
        "expert server %s: batch capacity is %d rows instead of %d: %s",
        candidate.address,
        capacity,
        settings.usual_rows,
        why,
    )


def _open_channel(
    candidate: Candidate, offer: pb.Offer, layout: FrameLayout, settings: HostSettings, keys: StreamKeys
) -> tuple[HostChannel, str]:
    """Opens the first offered channel that works; returns it and why it was chosen.
    Raises ServerError: none works, or the server's frame sizes are not the agreed ones."""
    host = Address(candidate.address).host
    reason = "as the setting says" if settings.transport != "auto" else ""
    last: ServerError | None = None
    for channel in offer.channels:
        sizes = ChannelSizes(channel.n_slots, channel.request_bytes, channel.reply_bytes)
        channel_offer = ChannelOffer(one_line(channel.transport, MAX_NAME), sizes, checked_parameters(channel))
        if (sizes.request_bytes, sizes.reply_bytes) != (layout.request_bytes, layout.reply_bytes):
            raise ServerError(
                f"expert server {candidate.address}: frame sizes are {sizes.request_bytes} and {sizes.reply_bytes} "
                f"bytes there, {layout.request_bytes} and {layout.reply_bytes} here"
            )
        try:
            opened = open_channel(
                channel_offer,
                host=host,
                timeout_s=settings.connect_timeout_s,
                keys=keys,
                encrypted=candidate.client.is_encrypted or not is_loopback(host),
            )
        except ServerError as error:
            last, reason = error, f"{channel_offer.transport} not possible: {one_line(str(error))}"
            continue
        if not reason:
            shared = channel_offer.transport == "shared"
            reason = "both on this machine" if shared else f"the server offers {channel_offer.transport} only"
        return opened, reason
    raise ServerError(f"expert server {candidate.address}: {last or 'it offered no channel'}")
