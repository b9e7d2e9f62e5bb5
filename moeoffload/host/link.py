"""The host's link to one expert server: its lease, its channel, its expert table, and the frames to and from it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import numpy as np
import torch

from moeoffload.control.client import ControlClient, Lease
from moeoffload.errors import CapacityError, DeadlineError, PayloadError, ProtocolError, ServerError
from moeoffload.host.flight import Chunk, Flight, ShardLink
from moeoffload.host.recorder import CallCounters
from moeoffload.page_locked import PageLocked
from moeoffload.payload import PayloadDtype, encode_rows, load_rows
from moeoffload.placement import ExpertTable
from moeoffload.transport import HostChannel, HostSlot
from moeoffload.wire import (
    HEADER_BYTES,
    ErrorCode,
    Flag,
    FrameHeader,
    FrameLayout,
    FrameReader,
    Kind,
    Role,
    SlotViews,
    read_error_text,
)

END_REASON_TIMEOUT_S: Final = 1.0
LEAVE_S: Final = 2.0
LOOK_S: Final = 0.02
LATE_FACTOR: Final = 8.0
"""A deadline is this multiple of the longest recent wait, or of the predicted time of all slots if that is longer."""
RECENT: Final = 0.98
"""Each reply decays the longest recent wait by this factor."""
_WEIGHTS_F32: Final = int(Flag.WEIGHTS_F32)
_ERRORS: Final[dict[int, type[ServerError]]] = {ErrorCode.CAPACITY: CapacityError, ErrorCode.TOO_LATE: DeadlineError}
"""The exceptions for error frames by code; other codes become a ServerError."""


@dataclass(frozen=True)
class LinkInfo:
    """What was agreed with one server, for the report."""

    address: str
    device: str
    device_name: str
    transport: str
    transport_reason: str
    kernel: str
    n_experts: int
    resident_bytes: int
    weight_errors: list[float] | None = None
    """For each layer with experts there, how far packed weights are from the stored ones; None if not packed."""


class Deadlines:
    """How long a dispatch to one server may take: a multiple of the time that recent ones took; in seconds."""

    def __init__(self, floor_s: float, ceiling_s: float, n_slots: int, timings: Sequence[tuple[int, float]]) -> None:
        """``n_slots`` requests may be in flight; ``timings`` are the (rows, seconds) of calls that the server timed."""
        self.ceiling_s = ceiling_s
        self._floor_s = floor_s
        self._n_slots = n_slots
        self._timings = sorted(timings) or [(1, 0.0)]
        self._predicted_s: dict[int, float] = {}
        self._longest_s = 0.0
        """The longest recent wait; it decays with each reply."""

    def of(self, n_rows: int) -> float:
        """Returns the deadline of a dispatch of ``n_rows``, with room for this host's other dispatches before it."""
        predicted = self._predicted_s.get(n_rows)
        if predicted is None:
            rows, seconds = zip(*self._timings, strict=True)
            predicted = float(np.interp(n_rows, rows, seconds)) * max(1.0, n_rows / rows[-1])
            self._predicted_s[n_rows] = predicted
        return min(self.ceiling_s, max(self._floor_s, LATE_FACTOR * max(self._longest_s, self._n_slots * predicted)))

    def waited(self, seconds: float) -> None:
        """Records how long the host waited for one reply."""
        self._longest_s = max(seconds, RECENT * self._longest_s)


@dataclass(slots=True, eq=False)
class _RemoteFlight(Flight):
    """Made once per slot and refilled."""

    slot: HostSlot = field(kw_only=True)
    views: SlotViews = field(kw_only=True)
    header: FrameHeader = field(kw_only=True)
    """The header of requests; the fields that all of them share are filled in once."""
    reply: FrameHeader = field(default_factory=FrameHeader)
    request_id: int = 0
    sent_at: float = 0.0
    deadline_s: float = 0.0


class ExpertLink(ShardLink):
    """Sends chunks of rows to one server and receives the sums.

    Attributes:
        client: the connection that carries the lease.
        lease: reports its own end, whatever the reason, and when the server drains.
        channel: carries the frames; counts replies that were late, duplicate or unknown.
        deadlines: how long dispatches may take.
    """

    def __init__(
        self,
        info: LinkInfo,
        client: ControlClient,
        lease: Lease,
        channel: HostChannel,
        layout: FrameLayout,
        epoch: int,
        table: ExpertTable,
        n_experts: list[int],
        device: torch.device,
        deadlines: Deadlines,
    ) -> None:
        super().__init__(f"expert server {info.address}", table, n_experts, layout, len(channel.slots), device)
        self.info = info
        self.client = client
        self.lease = lease
        self.channel = channel
        self._epoch = epoch
        self._reader = FrameReader(Role.HOST, layout, epoch)
        self.deadlines = deadlines
        self._leaving = False
        for slot in channel.slots:
            header = FrameHeader(Kind.DISPATCH, layout.dtype_out, layout.dtype_back, epoch=epoch, top_k=layout.top_k)
            views = SlotViews(layout, slot.request, slot.reply)
            slot.owner = _RemoteFlight(self, slot=slot, views=views, header=header)
        if device.type == "cuda":
            pages = PageLocked((buffer for slot in channel.slots for buffer in (slot.request, slot.reply)), device)
            # A thread that is still copying holds a reference to this link, which keeps the pages locked.
            weakref.finalize(self, pages.close).atexit = False
        lease.listen(lambda reason: channel.close())

    @property
    def n_created(self) -> int:
        """Number of flights and views created so far; 0 once closed."""
        flights = [slot.owner for slot in self.channel.slots]
        return sum(1 + flight.views.n_created for flight in flights if flight is not None)

    def take(self, *, wait: bool) -> Flight | None:
        """See `ShardLink`."""
        try:
            slot = self.channel.acquire(self.deadlines.ceiling_s if wait else 0.0)
        except ServerError as error:
            if isinstance(error, DeadlineError) and not wait:
                return None
            raise self._explain(error) from None
        flight: Flight | None = slot.owner
        if flight is None:
            raise self._explain(ServerError("the link is closed"))
        return flight

    def send(self, flight: Flight, layer: int, start: int, chunk: Chunk, to: CallCounters) -> bool:
        """See `ShardLink`."""
        assert isinstance(flight, _RemoteFlight)
        channel, slot, header = self.channel, flight.slot, flight.header
        try:
            boarded = self._board(flight, layer, start, chunk)
            if boarded is None:
                self.release(flight)
                return False
            self._pack(flight, *boarded)
            n_rows = flight.n_rows
            header.request_id = flight.request_id = channel.next_id(slot)
            header.layer, header.rows = layer, n_rows
            header.flags = _WEIGHTS_F32 if boarded[2].dtype is torch.float32 else 0
            header.body_bytes = n_rows * self.layout.dispatch_row_bytes
            flight.deadline_s = self.deadlines.of(n_rows)
            header.timeout_us = int(flight.deadline_s * 1e6)
            header.pack_into(slot.request)
            n_bytes = HEADER_BYTES + header.body_bytes
            channel.send(slot, n_bytes)
        except BaseException as error:
            self.release(flight)
            raise self._explain(error) if isinstance(error, ServerError) else error from None
        flight.sent_at = perf_counter()
        self.n_calls += 1
        to.calls += 1
        to.rows += n_rows
        to.bytes_out += n_bytes
        return True

    def _pack(self, flight: _RemoteFlight, hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> None:
        """Writes the body of a frame."""
        views = flight.views.dispatch(flight.n_rows)
        # From a GPU, the rows are copied last, since only their copy is waited for.
        views.weights.copy_(weights, non_blocking=True)
        views.slots.copy_(slots, non_blocking=True)
        encode_rows(hidden, views.rows, self.layout.dtype_out, where=flight.where)

    def receive(self, flight: Flight, to: CallCounters) -> torch.Tensor:
        """See `ShardLink`."""
        assert isinstance(flight, _RemoteFlight)
        slot = flight.slot
        # The wait for another reply may have used up the time; a reply that has arrived is accepted even so.
        left_s = max(min(LOOK_S, flight.deadline_s), flight.sent_at + flight.deadline_s - perf_counter())
        header = flight.reply
        try:
            n_bytes = self.channel.wait(slot, left_s)
            self._reader.read(header, slot.reply, n_bytes)
            if header.request_id != flight.request_id:
                raise ProtocolError("reply to another request")
            is_error = header.kind == Kind.ERROR
            if header.rows != flight.n_rows and not is_error:
                raise ProtocolError(f"combine frame: rows is {header.rows}, expected {flight.n_rows}")
            sums = flight.views.combine(flight.n_rows)
        except DeadlineError:
            raise DeadlineError(f"{self.name}: no reply within {flight.deadline_s:.3g} s") from None
        except ServerError as error:
            raise self._explain(error) from None
        if is_error:
            raise self._error(flight, header)
        self.deadlines.waited(perf_counter() - flight.sent_at)
        to.bytes_back += n_bytes
        flight.queue_s, flight.compute_s = header.queue_us * 1e-6, header.compute_us * 1e-6
        to.queue_s += flight.queue_s
        to.compute_s += flight.compute_s
        if self.layout.dtype_back is PayloadDtype.F8:
            stored, sums = sums, torch.empty(flight.n_rows, self.layout.hidden)
            load_rows(stored, sums)
        return sums

    def release(self, flight: Flight) -> None:
        """See `ShardLink`."""
        assert isinstance(flight, _RemoteFlight)
        flight.index = None
        self.channel.release(flight.slot)

    def close(self, *, grace_s: float = LEAVE_S) -> None:
        """Frees the channel and ends the lease, waiting up to ``grace_s`` for the server to confirm. Idempotent."""
        self._leaving = True
        for slot in self.channel.slots:
            # Slot, flight and link form a reference cycle: breaking it frees memory now, not at the next collection.
            flight, slot.owner = slot.owner, None
            if flight is not None:
                flight.views.drop()
        self.channel.close()
        self.lease.close(grace_s)
        self.client.close()

    def _explain(self, error: ServerError) -> ServerError:
        """Returns the error with the server's address, or with the reason why the lease ended, if it has."""
        address = self.info.address
        if isinstance(error, DeadlineError):
            return DeadlineError(f"{self.name}: {error}")
        # The closed channel is noticed first; the reason arrives over the lease a moment later.
        is_puzzling = type(error) is ServerError and not self._leaving
        reason = self.lease.why_ended(END_REASON_TIMEOUT_S if is_puzzling else 0)
        if reason is not None:
            return ServerError(reason)
        text = str(error)
        return type(error)(text if address in text else f"{self.name}: {text}")

    def _error(self, flight: _RemoteFlight, header: FrameHeader) -> Exception:
        text = read_error_text(flight.slot.reply, header.body_bytes)
        if header.code == ErrorCode.PAYLOAD and header.rows < flight.n_rows:
            return PayloadError(f"{flight.where(header.rows)}: expert output {text} ({self.name})")
        return _ERRORS.get(header.code, ServerError)(f"{self.name}: {text}")
