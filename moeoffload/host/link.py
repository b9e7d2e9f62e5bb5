"""One expert server as the host sees it: its lease, its channel, what it holds, and frames to and from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

from moeoffload.control.client import ControlClient, Lease
from moeoffload.errors import CapacityError, DeadlineError, PayloadError, ProtocolError, ServerError
from moeoffload.host.auto_slice import SliceLearner
from moeoffload.host.counters import CallCounters
from moeoffload.kernels.pack import RowPacker
from moeoffload.payload import describe_bad_row, encode_rows
from moeoffload.placement import ExpertTable, slot_table
from moeoffload.transport import HostChannel, HostSlot
from moeoffload.wire import HEADER_BYTES, ErrorCode, Flag, FrameHeader, FrameLayout, Kind, SlotViews, read_error_text

END_REASON_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True)
class LinkInfo:
    """What was agreed with one server; goes into the report."""

    address: str
    device: str
    device_name: str
    transport: str
    transport_reason: str
    kernel: str
    n_experts: int
    resident_bytes: int


@dataclass(slots=True, eq=False)
class Flight:
    """One request in flight; made once per slot and refilled. ``index`` are the rows sent, None if all of the chunk."""

    slot: HostSlot
    views: SlotViews
    packer: RowPacker
    header: FrameHeader = field(default_factory=FrameHeader)
    request_id: int = 0
    layer: int = 0
    start: int = 0
    chunk_rows: int = 0
    n_rows: int = 0
    index: torch.Tensor | None = None
    queue_s: float = 0.0
    compute_s: float = 0.0
    """What the server said of the reply, in seconds."""


class ExpertLink:
    """Sends chunks of rows to one server and takes the sums back."""

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
        dtype: torch.dtype,
        timeout_s: float,
        learner: SliceLearner,
    ) -> None:
        self.info = info
        self.learner = learner
        self.layout = layout
        self.table = table
        self.n_slots = len(channel.slots)
        self._client = client
        self._lease = lease
        self._channel = channel
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._timeout_us = int(timeout_s * 1e6)
        self.holds_all = [len(held) == n for held, n in zip(table.layers, n_experts, strict=True)]
        self.holds_none = [not held for held in table.layers]
        self._slot_of = [slot_table(held, n).to(device) for held, n in zip(table.layers, n_experts, strict=True)]
        for slot in channel.slots:
            body = torch.frombuffer(slot.request, dtype=torch.uint8, offset=HEADER_BYTES).data_ptr()
            payload = layout.dtype_out.torch_dtype
            packer = RowPacker(body, dtype, payload, hidden=layout.hidden, top_k=layout.top_k)
            slot.owner = Flight(slot, SlotViews(layout, slot.request, slot.reply), packer)
        lease.on_end(lambda reason: channel.close())

    @property
    def n_created(self) -> int:
        """Frames and views made so far."""
        return sum(1 + slot.owner.views.n_created for slot in self._channel.slots)

    def take_slot(self, *, wait: bool) -> HostSlot | None:
        """A free slot for `send`; without ``wait``, None if there is none at the moment.

        Raises:
            DeadlineError: none came free within the dispatch timeout.
            ServerError: the channel is closed.
        """
        try:
            return self._channel.acquire(self._timeout_s if wait else 0.0)
        except DeadlineError as error:
            if not wait:
                return None
            raise self._explain(error) from None
        except ServerError as error:
            raise self._explain(error) from None

    def send(
        self,
        slot: HostSlot,
        layer: int,
        start: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        to: CallCounters,
    ) -> Flight | None:
        """Sends the rows of one chunk that need this server; None, and the slot is free again, if there is none.

        Args:
            slot: from `take_slot`; `release` gives it back.
            layer: running number of the MoE layer.
            start: number of the chunk's first row in the call.
            hidden: (n, hidden) of the chunk, any device.
            ids: (n, top_k) int64 expert numbers.
            weights: (n, top_k).
            to: where the call is counted.

        Raises:
            PayloadError: a value does not fit the payload dtype.
            ServerError: the channel is closed or no slot comes free in time.
        """
        channel, layout = self._channel, self.layout
        try:
            flight: Flight = slot.owner
            if flight.packer.takes(hidden, ids, weights):
                n_rows, index = self._pack_few(flight, layer, start, hidden, ids, weights)
            else:
                n_rows, index = self._pack(flight, layer, start, hidden, ids, weights)
            if n_rows == 0:
                channel.release(slot)
                return None
            header = flight.header
            header.kind = Kind.DISPATCH
            header.dtype_out, header.dtype_back = layout.dtype_out, layout.dtype_back
            header.request_id = flight.request_id = channel.next_id(slot)
            header.epoch, header.layer, header.top_k, header.rows = self._epoch, layer, layout.top_k, n_rows
            header.flags = Flag.WEIGHTS_F32 if weights.dtype == torch.float32 else Flag.NONE
            header.body_bytes = layout.dispatch_body_bytes(n_rows)
            header.timeout_us = self._timeout_us
            header.queue_us = header.compute_us = header.code = 0
            header.pack_into(slot.request)
            n_bytes = HEADER_BYTES + header.body_bytes
            channel.send(slot, n_bytes)
        except BaseException as error:
            channel.release(slot)
            raise self._explain(error) if isinstance(error, ServerError) else error from None
        flight.layer, flight.start, flight.n_rows, flight.index = layer, start, n_rows, index
        flight.chunk_rows = ids.shape[0]
        to.calls += 1
        to.rows += n_rows
        to.bytes_out += n_bytes
        return flight

    def _pack(
        self,
        flight: Flight,
        layer: int,
        start: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[int, torch.Tensor | None]:
        """Writes the body of a frame; how many rows have an expert here, and which, None if all of the chunk."""
        slots = self._slot_of[layer][ids]
        index = None
        if not self.holds_all[layer]:
            hit = (slots >= 0).any(dim=1)
            n_hit = int(hit.sum())
            if n_hit == 0:
                return 0, None
            if n_hit < hidden.shape[0]:
                index = hit.nonzero().squeeze(1)
                hidden, slots, weights = hidden[index], slots[index], weights[index]
        views = flight.views.dispatch(hidden.shape[0])
        dtype = self.layout.dtype_out
        encode_rows(hidden, views.rows, dtype, where=lambda row: _where(layer, start, index, row))
        views.weights.copy_(weights)
        views.slots.copy_(slots)
        return hidden.shape[0], index

    def _pack_few(
        self,
        flight: Flight,
        layer: int,
        start: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[int, torch.Tensor | None]:
        """As `_pack`, for what the slot's packer takes."""
        packer = flight.packer
        index = packer.pack(hidden, ids, weights, self._slot_of[layer], holds_all=self.holds_all[layer])
        bad = packer.bad_row
        if bad is not None:
            row = hidden[bad if index is None else int(index[bad])]
            what = describe_bad_row(row, self.layout.dtype_out)
            raise PayloadError(f"{_where(layer, start, index, bad)}: hidden states {what}")
        return packer.n_rows, index

    def receive(self, flight: Flight, to: CallCounters) -> torch.Tensor:
        """Waits for the sum that answers ``flight``: (n_rows, hidden) in the payload dtype, valid until `release`.

        Raises:
            DeadlineError: no answer within the dispatch timeout.
            ServerError: the server refused, failed or is gone.
            PayloadError: the server's result does not fit the payload dtype.
        """
        slot = flight.slot
        try:
            n_bytes = self._channel.wait(slot, self._timeout_s)
        except ServerError as error:
            raise self._explain(error) from None
        header = flight.header
        try:
            header.unpack_from(slot.reply)
            if header.request_id != flight.request_id:
                raise ProtocolError("reply to another request")
            if header.kind != Kind.ERROR:
                self.layout.check_combine(header, n_bytes, flight.n_rows)
        except ServerError as error:
            raise self._explain(error) from None
        if header.kind == Kind.ERROR:
            raise self._error(flight, header)
        to.bytes_back += n_bytes
        flight.queue_s, flight.compute_s = header.queue_us * 1e-6, header.compute_us * 1e-6
        to.queue_s += flight.queue_s
        to.compute_s += flight.compute_s
        return flight.views.combine(flight.n_rows)

    def release(self, flight: Flight) -> None:
        """Gives the slot of ``flight`` back; if its reply was not received it is dropped when it comes."""
        flight.index = None
        self._channel.release(flight.slot)

    def close(self) -> None:
        """Ends the lease and frees the channel. Idempotent."""
        for slot in self._channel.slots:
            slot.owner.views.drop()
        self._channel.close()
        self._lease.close()
        self._client.close()

    def _explain(self, error: ServerError) -> ServerError:
        """The error with the server's address, and with the lease's reason if that has ended."""
        address = self.info.address
        if isinstance(error, DeadlineError):
            return DeadlineError(f"expert server {address}: {error}")
        # A closed channel shows first; why it was closed comes over the lease a moment later.
        reason = self._lease.why_ended(END_REASON_TIMEOUT_S if type(error) is ServerError else 0)
        if reason is not None:
            return ServerError(reason)
        text = str(error)
        return type(error)(text if address in text else f"expert server {address}: {text}")

    def _error(self, flight: Flight, header: FrameHeader) -> Exception:
        text = read_error_text(flight.slot.reply, header.body_bytes)
        address = self.info.address
        if header.code == ErrorCode.PAYLOAD and header.rows < flight.n_rows:
            where = _where(flight.layer, flight.start, flight.index, header.rows)
            return PayloadError(f"{where}: expert output {text} (expert server {address})")
        kind = CapacityError if header.code == ErrorCode.CAPACITY else ServerError
        return kind(f"expert server {address}: {text}")


def _where(layer: int, start: int, index: torch.Tensor | None, row: int) -> str:
    """Names a row of a frame by its number in the call."""
    return f"layer {layer}, row {start + (row if index is None else int(index[row]))}"
