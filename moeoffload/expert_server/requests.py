"""One received request: its host, its checked header, and the error that refuses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import torch

from moeoffload.errors import ProtocolError
from moeoffload.expert_server.arena import DeviceArena, HostArena
from moeoffload.expert_server.fair_share import SMALL_ROWS, Share
from moeoffload.kernels import LayerKernels
from moeoffload.transport.base import ServerChannel, ServerSlot
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
)

_WEIGHTS_F32: Final = int(Flag.WEIGHTS_F32)


@dataclass(slots=True, eq=False)
class ActiveHost:
    """What the engine needs of one attached host. ``layers`` holds its experts by MoE layer, None where it has none."""

    epoch: int
    layout: FrameLayout
    layers: Sequence[LayerKernels | None]
    compute_dtype: torch.dtype
    arena: HostArena | DeviceArena
    share: HostShare
    closed: bool = False
    reader: FrameReader = field(init=False)
    small_bytes: int = field(init=False)
    """Frames of at most this many bytes are small requests."""

    def __post_init__(self) -> None:
        self.reader = FrameReader(Role.SERVER, self.layout, self.epoch)
        self.small_bytes = HEADER_BYTES + min(SMALL_ROWS, self.layout.capacity) * self.layout.dispatch_row_bytes


@dataclass(slots=True, eq=False)
class Request:
    """One slot of a host's channel with the request that it holds now; made once, with the channel."""

    host: ActiveHost
    channel: ServerChannel
    slot: ServerSlot
    views: SlotViews = field(init=False)
    header: FrameHeader = field(default_factory=FrameHeader)

    def __post_init__(self) -> None:
        self.views = SlotViews(self.host.layout, self.slot.request, self.slot.reply)

    @property
    def is_small(self) -> bool:
        """Whether it is decode- or verify-shaped."""
        return self.slot.n_bytes <= self.host.small_bytes

    @property
    def weights_dtype(self) -> torch.dtype:
        """Dtype of the routing weights, from the checked header."""
        return torch.float32 if self.header.flags & _WEIGHTS_F32 else self.host.compute_dtype

    def check(self) -> LayerKernels:
        """Reads and checks the header before anything is allocated; returns the experts of its layer.
        Raises ProtocolError, CapacityError: the frame differs from what was agreed on; RequestError: its experts are
        not here, or the host no longer waits for the reply."""
        header, slot, layers = self.header, self.slot, self.host.layers
        self.host.reader.read(header, slot.request, slot.n_bytes)
        if header.layer >= len(layers):
            raise ProtocolError(f"frame layer is {header.layer}, the model has {len(layers)} MoE layers")
        experts = layers[header.layer]
        if experts is None:
            raise RequestError(ErrorCode.BAD_SLOT, f"layer {header.layer}: this server holds none of its experts")
        if self.channel.is_cancelled(slot):
            raise RequestError(ErrorCode.TOO_LATE, "the host does not wait for it any more")
        waited_s = perf_counter() - slot.received_at
        if 0 < header.timeout_us < waited_s * 1e6:
            raise RequestError(ErrorCode.TOO_LATE, f"it has waited {waited_s:.3g} s, the host {header.timeout_us} us")
        return experts

    def write_sums_header(self, queue_s: float, compute_s: float) -> int:
        """Writes the header before the sums in the reply buffer; returns the frame's length in bytes."""
        header = self.header
        header.kind, header.code = Kind.COMBINE, 0
        header.body_bytes = header.rows * self.host.layout.combine_row_bytes
        header.queue_us = _microseconds(queue_s)
        header.compute_us = _microseconds(compute_s)
        header.pack_into(self.slot.reply)
        return HEADER_BYTES + header.body_bytes


class RequestError(Exception):
    """A request that is answered with an error frame."""

    def __init__(self, code: ErrorCode, text: str, row: int = 0) -> None:
        super().__init__(text)
        self.code = code
        self.row = row


class Job:
    """Work to be done on the compute thread between two requests."""

    is_small: Final = False

    def __init__(self, work: Callable[[], Any]) -> None:
        self.done: Future[Any] = Future()
        self._work = work

    def run(self) -> None:
        """Does the work, unless its result is no longer waited for."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self._work())
        except Exception as error:  # raised in the thread that waits for the result
            self.done.set_exception(error)


HostShare = Share[Request | Job]


def _microseconds(seconds: float) -> int:
    return max(0, min(int(seconds * 1e6), 0xFFFF_FFFF))
