"""One received request: whose it is, what its header says, and how it is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import InitVar, dataclass, field
from typing import Any, Final, NamedTuple

import torch

from moeoffload.errors import CapacityError, ProtocolError
from moeoffload.expert_server.compiled_steps import CompiledSteps
from moeoffload.expert_server.fair_share import BRIEF_ROWS, Share
from moeoffload.expert_server.workspace import Workspace
from moeoffload.kernels import LayerKernels
from moeoffload.kernels.turnaround_words import MOST_ROWS
from moeoffload.transport.base import ServerChannel, ServerSlot
from moeoffload.wire import (
    HEADER_BYTES,
    ErrorCode,
    Flag,
    FrameHeader,
    FrameLayout,
    Kind,
    SlotViews,
    write_error_text,
)

_WEIGHTS_F32: Final = int(Flag.WEIGHTS_F32)


@dataclass(slots=True, eq=False)
class ActiveHost:
    """What the engine needs of one attached host. ``layers`` holds its experts by MoE layer, None where it has none."""

    epoch: int
    layout: FrameLayout
    layers: Sequence[LayerKernels | None]
    compute_dtype: torch.dtype
    workspace: Workspace
    share: HostShare
    closed: bool = False
    steps: CompiledSteps | None = None
    """For small requests that come one at a time; for whoever has the right to compute."""
    brief_bytes: int = field(init=False)
    """Frames of up to so many bytes are brief requests."""
    row_bytes: int = field(init=False)
    """Those of one row."""
    step_bytes: int = field(init=False)
    """Those for which there may be ``steps``."""

    def __post_init__(self) -> None:
        self.brief_bytes, self.row_bytes, self.step_bytes = (
            HEADER_BYTES + self.layout.dispatch_body_bytes(min(n_rows, self.layout.capacity))
            for n_rows in (BRIEF_ROWS, 1, MOST_ROWS)
        )

    def make_steps(self) -> CompiledSteps | None:
        """New ones; to be called while nobody computes."""
        return None


class SlotPlaces(NamedTuple):
    """Addresses of a slot's buffers, good as long as this lives."""

    request: int
    reply: int
    kept: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, slot: ServerSlot) -> SlotPlaces:
        """Those of a slot."""
        request, reply = (torch.frombuffer(buffer, dtype=torch.uint8) for buffer in (slot.request, slot.reply))
        return cls(request.data_ptr(), reply.data_ptr(), (request, reply))


@dataclass(slots=True, eq=False)
class SlotContext:
    """What belongs to one slot of a host's channel; made once, when the channel is."""

    host: ActiveHost
    slot: InitVar[ServerSlot]
    views: SlotViews = field(init=False)
    header: FrameHeader = field(default_factory=FrameHeader)
    places: SlotPlaces | None = field(init=False)
    """None when the slot's memory was let go of."""

    def __post_init__(self, slot: ServerSlot) -> None:
        self.views = SlotViews(self.host.layout, slot.request, slot.reply)
        self.places = SlotPlaces.of(slot)

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of the routing weights, as the header that was checked says."""
        return torch.float32 if self.header.flags & _WEIGHTS_F32 else self.host.compute_dtype

    @property
    def n_created(self) -> int:
        """Views and the like made so far."""
        return self.views.n_created

    def drop(self) -> None:
        """Lets go of the slot's memory. From any thread."""
        self.views.drop()
        self.places = None


class RequestError(Exception):
    """A request that is answered with an error frame."""

    def __init__(self, code: ErrorCode, text: str, row: int = 0) -> None:
        super().__init__(text)
        self.code = code
        self.row = row


class Job:
    """Something to be done on the compute thread between two requests."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.done: Future[Any] = Future()
        self._work = work

    def run(self) -> None:
        """Does it, unless nobody waits for it any more."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self._work())
        except Exception as error:  # whoever asked for it is told
            self.done.set_exception(error)


Request = tuple[ServerChannel, ServerSlot]
"""``slot.owner`` is its `SlotContext`."""
HostShare = Share[Request | Job]


def is_brief(request: Request | Job) -> bool:
    """Whether it is decode- or verify-shaped."""
    return not isinstance(request, Job) and request[1].n_bytes <= request[1].owner.host.brief_bytes


def check(slot: ServerSlot, context: SlotContext) -> LayerKernels:
    """Reads and checks the header; returns the experts of its layer. Allocates nothing before.

    Raises:
        RequestError: the frame is not one that was agreed on, or its experts are not here.
    """
    host, header = context.host, context.header
    try:
        header.unpack_from(slot.request)
        if header.kind != Kind.DISPATCH:
            raise ProtocolError(f"frame kind is {header.kind}, expected {int(Kind.DISPATCH)}")
        if header.epoch != host.epoch:
            raise ProtocolError(f"frame epoch is {header.epoch}, this lease has {host.epoch}")
        host.layout.check_dispatch(header, slot.n_bytes)
        layers = host.layers
        if header.layer >= len(layers):
            raise ProtocolError(f"frame layer is {header.layer}, the model has {len(layers)} MoE layers")
    except CapacityError as error:
        raise RequestError(ErrorCode.CAPACITY, str(error)) from None
    except ProtocolError as error:
        raise RequestError(ErrorCode.BAD_FRAME, str(error)) from None
    experts = layers[header.layer]
    if experts is None:
        raise RequestError(ErrorCode.BAD_SLOT, f"layer {header.layer}: this server holds none of its experts")
    return experts


def write_error(slot: ServerSlot, header: FrameHeader, code: ErrorCode, text: str, row: int = 0) -> int:
    """Writes an error frame into the reply buffer; returns its length in bytes."""
    header.kind = Kind.ERROR
    header.code = code
    header.rows = row
    header.body_bytes = write_error_text(slot.reply, text)
    header.pack_into(slot.reply)
    header.code = 0
    return HEADER_BYTES + header.body_bytes


def write_sums_header(slot: ServerSlot, context: SlotContext, queue_s: float, compute_s: float) -> int:
    """Puts the header before the sums in the reply buffer; returns the frame's length in bytes."""
    header = context.header
    header.kind, header.code = Kind.COMBINE, 0
    header.body_bytes = header.rows * context.host.layout.combine_row_bytes
    header.queue_us = _microseconds(queue_s)
    header.compute_us = _microseconds(compute_s)
    header.pack_into(slot.reply)
    return HEADER_BYTES + header.body_bytes


def _microseconds(seconds: float) -> int:
    return max(0, min(int(seconds * 1e6), 0xFFFF_FFFF))
