"""Takes the requests of all hosts, runs the kernel, writes the replies. One computes at a time.

Large requests go through a compute thread, in order of arrival. A small one, a decode step, is computed by the thread
that received it if nobody else computes, and before what else waits: a hop to another thread would cost it more than
the rest of the way.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, TypeVar

import torch

from moeoffload.errors import CapacityError, MoeOffloadError, ProtocolError, ServerError
from moeoffload.expert_server.calibrate import Pace
from moeoffload.expert_server.workspace import Workspace
from moeoffload.kernels import KernelWorkspace, LayerKernels
from moeoffload.payload import describe_bad_row
from moeoffload.transport.base import ServerChannel, ServerSlot, Work
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

logger = logging.getLogger(__name__)

SMALL_BYTES: Final = 1 << 17
"""Frames of up to so many bytes are small."""
_STOP: Final = None
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class ActiveHost:
    """What the engine needs of one attached host. ``layers`` holds its experts by MoE layer, None where it has none."""

    epoch: int
    layout: FrameLayout
    layers: Sequence[LayerKernels | None]
    compute_dtype: torch.dtype
    workspace: Workspace
    closed: bool = False


@dataclass(slots=True, eq=False)
class SlotContext:
    """What belongs to one slot of a host's channel; made once, when the channel is."""

    host: ActiveHost
    views: SlotViews
    header: FrameHeader = field(default_factory=FrameHeader)


@dataclass(slots=True)
class EngineCounters:
    """Totals since start; times in seconds."""

    requests: int = 0
    rows: int = 0
    errors: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0


class _RequestError(Exception):
    """A request that is answered with an error frame."""

    def __init__(self, code: ErrorCode, text: str, row: int = 0) -> None:
        super().__init__(text)
        self.code = code
        self.row = row


class _Job:
    """Something to be done on the compute thread between two requests."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.done: Future[Any] = Future()
        self._work = work

    def run(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self._work())
        except Exception as error:  # whoever asked for it is told
            self.done.set_exception(error)


class Engine:
    """Owns the compute thread and the right to compute. `submit` may be called from any thread."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.counters = EngineCounters()
        self.kernel_workspace = KernelWorkspace()
        self._requests: queue.SimpleQueue[tuple[ServerChannel, ServerSlot] | _Job | None] = queue.SimpleQueue()
        self._small: deque[tuple[ServerChannel, ServerSlot]] = deque()
        self._computing = threading.Lock()
        self._n_large = 0
        """Large requests and jobs that are not finished; each is followed by a look at the small ones."""
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the compute thread."""
        self._thread.start()

    def submit(self, channel: ServerChannel, slot: ServerSlot) -> Work | None:
        """Queues a received request; ``slot.owner`` must be its `SlotContext`. Returns what the caller has to do."""
        if slot.n_bytes <= SMALL_BYTES:
            self._small.append((channel, slot))
            return self.compute_small
        self._put((channel, slot))
        return None

    def compute_small(self) -> None:
        """Computes the small requests that wait, unless another thread computes: that one will, when it is done."""
        while self._small and not self._n_large and self._computing.acquire(blocking=False):
            try:
                self._drain_small()
            finally:
                self._computing.release()

    def run(self, work: Callable[[], T], timeout_s: float) -> T:
        """Runs ``work`` on the compute thread, after what was submitted before, and returns its result.

        Raises:
            ServerError: the thread did not come to it within ``timeout_s``; and whatever ``work`` raises.
        """
        job = _Job(work)
        self._put(job)
        try:
            result: T = job.done.result(timeout_s)
        except TimeoutError:
            job.done.cancel()
            raise ServerError(f"the compute thread was busy for {timeout_s:g} s") from None
        return result

    def stop(self, timeout_s: float) -> None:
        """Finishes what was submitted before and ends the thread."""
        self._requests.put(_STOP)
        self._thread.join(timeout_s)

    def _put(self, request: tuple[ServerChannel, ServerSlot] | _Job) -> None:
        with self._counting:
            self._n_large += 1
        self._requests.put(request)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            with self._computing:
                if isinstance(request, _Job):
                    with torch.inference_mode():
                        request.run()
                else:
                    self._serve(*request)
                self._drain_small()
            with self._counting:
                self._n_large -= 1
            self.compute_small()

    def _drain_small(self) -> None:
        """Computes the small requests that wait at the moment, no later ones: large ones have their turn, too."""
        for _ in range(len(self._small)):
            self._serve(*self._small.popleft())

    @torch.inference_mode()
    def _serve(self, channel: ServerChannel, slot: ServerSlot) -> None:
        context: SlotContext = slot.owner
        if context.host.closed:
            return
        try:
            channel.reply(slot, self._answer(slot, context))
        except MoeOffloadError as error:
            logger.warning("epoch %d: reply not sent: %s", context.host.epoch, error)
        except Exception:  # a host can spoil the memory and the semaphores it shares; other hosts are served on
            logger.exception("epoch %d: reply not sent", context.host.epoch)

    def _answer(self, slot: ServerSlot, context: SlotContext) -> int:
        """Computes one request into the slot's reply buffer; returns the reply frame's length in bytes."""
        started = perf_counter()
        host, header = context.host, context.header
        counters = self.counters
        try:
            n_rows = self._compute(slot, context)
        except _RequestError as error:
            counters.errors += 1
            logger.warning("epoch %d: request refused: %s", context.host.epoch, error)
            return _write_error(slot, header, error.code, str(error), error.row)
        except Exception as error:
            counters.errors += 1
            if host.closed:  # its buffers went while it was computed; nobody waits for this
                return _write_error(slot, header, ErrorCode.DRAINING, "the lease has ended")
            logger.exception("epoch %d: request failed", context.host.epoch)
            return _write_error(slot, header, ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        finished = perf_counter()
        counters.requests += 1
        counters.rows += n_rows
        counters.queue_s += started - slot.received_at
        counters.compute_s += finished - started
        header.kind = Kind.COMBINE
        header.body_bytes = context.host.layout.combine_body_bytes(n_rows)
        header.queue_us = _microseconds(started - slot.received_at)
        header.compute_us = _microseconds(finished - started)
        header.pack_into(slot.reply)
        return HEADER_BYTES + header.body_bytes

    def _compute(self, slot: ServerSlot, context: SlotContext) -> int:
        host, header = context.host, context.header
        experts = _check(slot, context)
        n_rows = header.rows
        weights_dtype = torch.float32 if header.flags & Flag.WEIGHTS_F32 else host.compute_dtype
        arena, views = host.workspace.arena(n_rows), context.views
        started = perf_counter() if self.pace.slows else 0.0
        try:
            call = arena.fill(views.dispatch(n_rows), n_rows, weights_dtype, experts.n_experts)
            experts(call.rows, call.slots, call.weights, call.out)
        except IndexError:
            raise _RequestError(
                ErrorCode.BAD_SLOT, f"layer {header.layer}: slots must be -1 to {experts.n_experts - 1}"
            ) from None
        if self.pace.slows:
            self.pace.hold(call.slots, started)
        reply = views.combine(n_rows)
        bad = arena.finish(call, reply)
        if bad is not None:
            what = describe_bad_row(call.out[bad], host.layout.dtype_back)
            raise _RequestError(ErrorCode.PAYLOAD, what, bad)
        return n_rows


def _check(slot: ServerSlot, context: SlotContext) -> LayerKernels:
    """Reads and checks the header; returns the experts of its layer. Nothing was allocated before."""
    host, header = context.host, context.header
    try:
        header.unpack_from(slot.request)
        if header.kind != Kind.DISPATCH:
            raise ProtocolError(f"frame kind is {header.kind}, expected {int(Kind.DISPATCH)}")
        if header.epoch != host.epoch:
            raise ProtocolError(f"frame epoch is {header.epoch}, this lease has {host.epoch}")
        host.layout.check_dispatch(header, slot.n_bytes)
        if header.layer >= len(host.layers):
            raise ProtocolError(f"frame layer is {header.layer}, the model has {len(host.layers)} MoE layers")
    except CapacityError as error:
        raise _RequestError(ErrorCode.CAPACITY, str(error)) from None
    except ProtocolError as error:
        raise _RequestError(ErrorCode.BAD_FRAME, str(error)) from None
    experts = host.layers[header.layer]
    if experts is None:
        raise _RequestError(ErrorCode.BAD_SLOT, f"layer {header.layer}: this server holds none of its experts")
    return experts


def _write_error(slot: ServerSlot, header: FrameHeader, code: ErrorCode, text: str, row: int = 0) -> int:
    header.kind = Kind.ERROR
    header.code = code
    header.rows = row
    header.body_bytes = write_error_text(slot.reply, text)
    header.pack_into(slot.reply)
    header.code = 0
    return HEADER_BYTES + header.body_bytes


def _microseconds(seconds: float) -> int:
    return max(0, min(int(seconds * 1e6), 0xFFFF_FFFF))
