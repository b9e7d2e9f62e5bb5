"""Takes the requests of all hosts, runs the kernel, writes the replies. One computes at a time.

Whose request is next says `fair_share`; each host's small ones come before its large ones. Large requests go through a
compute thread. A small one, a decode step, is computed by the thread that received it if nobody else computes: a hop to
another thread would cost it more than the rest of the way. With several hosts at work that thread only receives, or
one host's frames would wait while it computes another's; and long calls are computed in steps, between which brief
requests of other hosts have their turn.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, TypeVar

import torch

from moeoffload.errors import CapacityError, MoeOffloadError, ProtocolError, ServerError
from moeoffload.expert_server.calibrate import Pace
from moeoffload.expert_server.fair_share import BRIEF_PRICE, BRIEF_ROWS, FairShares, Share
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
RECENT_S: Final = 10.0
"""So long after two hosts took turns the threads that receive do not compute."""
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
    share: HostShare
    closed: bool = False
    brief_bytes: int = field(init=False)
    """Frames of up to so many bytes are brief requests."""

    def __post_init__(self) -> None:
        self.brief_bytes = HEADER_BYTES + self.layout.dispatch_body_bytes(min(BRIEF_ROWS, self.layout.capacity))


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


_Request = tuple[ServerChannel, ServerSlot]
HostShare = Share[_Request | Job]


class Engine:
    """Owns the compute thread and the right to compute. `submit` may be called from any thread."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.counters = EngineCounters()
        self.kernel_workspace = KernelWorkspace()
        self.shares: FairShares[_Request | Job] = FairShares()
        self._urgent_workspace = KernelWorkspace()
        """For brief requests between the steps of a long call."""
        self._tokens: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
        """One for each request and job that the compute thread has to look for."""
        self._n_tokens = 0
        """Tokens that are not used up; each is followed by a look at the small requests."""
        self._counting = threading.Lock()
        self._computing = threading.Lock()
        self._price = 1.0
        """Of the call that is computed."""
        self._given_s = 0.0
        """Seconds of the call that is computed in which brief requests of other hosts had their turn."""
        self._working: tuple[HostShare, float] = (Share(""), 0.0)
        """Whose job is run, and since when."""
        self._last: HostShare | None = None
        """Of the last request, and until when it was not the only one lately (perf_counter seconds)."""
        self._shared_until = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the compute thread."""
        self._thread.start()

    def submit(self, channel: ServerChannel, slot: ServerSlot) -> Work | None:
        """Queues a received request; ``slot.owner`` must be its `SlotContext`. Returns what the caller has to do."""
        share = slot.owner.host.share
        if slot.n_bytes <= SMALL_BYTES:
            share.small.append((channel, slot))
            if self.shares.n_shares == 1 or not self._takes_turns(share, slot.received_at):
                return self.compute_small
            self._wake()
        else:
            share.large.append((channel, slot))
            self._wake()
        return None

    def _takes_turns(self, share: HostShare, now: float) -> bool:
        """Whether several hosts have been at work lately."""
        if share is not self._last:
            if self._last is not None:
                self._shared_until = now + RECENT_S
            self._last = share
        return now < self._shared_until

    def compute_small(self) -> None:
        """Computes the small requests that wait, unless another thread computes: that one will, when it is done."""
        while not self._n_tokens and self.shares.has_small() and self._computing.acquire(blocking=False):
            try:
                while (share := self._pick()) is not None and share.small:
                    self._serve_next(share)
            finally:
                self._computing.release()

    def run(self, work: Callable[[], T], share: HostShare, timeout_s: float) -> T:
        """Runs ``work`` on the compute thread when it is the turn of this host, and returns its result.

        Raises:
            ServerError: the thread did not come to it within ``timeout_s``, or the host's lease ended; and whatever
                ``work`` raises.
        """
        job = Job(work)
        share.large.append(job)
        self._wake()
        try:
            result: T = job.done.result(timeout_s)
        except TimeoutError:
            job.done.cancel()
            raise ServerError(f"the compute thread was busy for {timeout_s:g} s") from None
        except CancelledError:
            raise ServerError("the lease ended") from None
        return result

    def pause(self) -> float:
        """For work that `run` runs: lets brief requests of other hosts have their turn; returns the seconds it took."""
        before = self._given_s
        self._give_way(*self._working)
        return self._given_s - before

    def leave(self, share: HostShare) -> None:
        """Gives back what ``shares.join`` gave, when a lease has ended; its requests are not answered any more."""
        for request in self.shares.leave(share):
            if isinstance(request, Job):
                request.done.cancel()

    def stop(self, timeout_s: float) -> None:
        """Finishes what was submitted before and ends the thread."""
        self._tokens.put(_STOP)
        self._thread.join(timeout_s)

    def _wake(self) -> None:
        with self._counting:
            self._n_tokens += 1
        self._tokens.put(True)

    def _run(self) -> None:
        while self._tokens.get() is not _STOP:
            with self._computing:
                # Up to one large request, for which this token may have been; small ones also have other ways.
                while (share := self._pick()) is not None and not self._serve_next(share):
                    pass
            with self._counting:
                self._n_tokens -= 1
            self.compute_small()

    def _pick(self) -> HostShare | None:
        """Whose turn it is; what has arrived by now counts."""
        if self.shares.n_shares > 1:
            os.sched_yield()  # as in `_give_way`
        return self.shares.pick()

    def _serve_next(self, share: HostShare) -> bool:
        """Serves the next request of a host that waits; whether that was a large one."""
        started = perf_counter()
        self._given_s = 0.0
        request, is_large = share.next()
        self._price = BRIEF_PRICE if _is_brief(request) else 1.0
        if isinstance(request, Job):
            self._working = (share, started)
            with torch.inference_mode():
                request.run()
        else:
            self._serve(*request)
        share.charge(perf_counter() - started - self._given_s, self._price)
        return is_large

    def _give_way(self, share: HostShare, started: float) -> None:
        """Between two steps of a call of this host: computes others' brief requests whose turn it is."""
        os.sched_yield()  # to the threads that receive, where this one has their core
        while True:
            now = perf_counter()
            rival = self.shares.rival(share, share.used_s + (now - started - self._given_s) * self._price)
            if rival is None:
                return
            request = rival.small[0]
            if isinstance(request, Job) or not _is_brief(request):
                return  # it has to wait until this call is finished
            rival.next()
            self._serve(*request, interrupting=True)
            took_s = perf_counter() - now
            rival.charge(took_s, BRIEF_PRICE)
            self._given_s += took_s

    @torch.inference_mode()
    def _serve(self, channel: ServerChannel, slot: ServerSlot, *, interrupting: bool = False) -> None:
        context: SlotContext = slot.owner
        if context.host.closed:
            return
        try:
            channel.reply(slot, self._answer(slot, context, interrupting))
        except MoeOffloadError as error:
            logger.warning("epoch %d: reply not sent: %s", context.host.epoch, error)
        except Exception:  # a host can spoil the memory and the semaphores it shares; other hosts are served on
            logger.exception("epoch %d: reply not sent", context.host.epoch)

    def _answer(self, slot: ServerSlot, context: SlotContext, interrupting: bool) -> int:
        """Computes one request into the slot's reply buffer; returns the reply frame's length in bytes."""
        started = perf_counter()
        host, header = context.host, context.header
        counters = self.counters
        try:
            n_rows = self._compute(slot, context, interrupting)
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
        finished = perf_counter() - (0.0 if interrupting else self._given_s)
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

    def _compute(self, slot: ServerSlot, context: SlotContext, interrupting: bool) -> int:
        host, header = context.host, context.header
        experts = _check(slot, context)
        n_rows = header.rows
        weights_dtype = torch.float32 if header.flags & Flag.WEIGHTS_F32 else host.compute_dtype
        arena, views = host.workspace.arena(n_rows), context.views
        started = perf_counter()
        reply = views.combine(n_rows)  # the lease may end meanwhile
        try:
            call = arena.fill(views.dispatch(n_rows), n_rows, weights_dtype, experts.n_experts)
            if interrupting:
                experts(call.rows, call.slots, call.weights, call.out, self._urgent_workspace)
            elif n_rows == 1 or self.shares.n_shares == 1:
                experts(call.rows, call.slots, call.weights, call.out)
            else:
                step_s = functools.partial(self.shares.step_s, host.share)
                for _ in experts.in_steps(call.rows, call.slots, call.weights, call.out, step_s):
                    self._give_way(host.share, started)
        except IndexError:
            raise _RequestError(
                ErrorCode.BAD_SLOT, f"layer {header.layer}: slots must be -1 to {experts.n_experts - 1}"
            ) from None
        if self.pace.slows:
            self._hold(call.slots, started, host.share, interrupting)
        bad = arena.finish(call, reply)
        if bad is not None:
            what = describe_bad_row(call.out[bad], host.layout.dtype_back)
            raise _RequestError(ErrorCode.PAYLOAD, what, bad)
        return n_rows

    def _hold(self, slots: torch.Tensor, started: float, share: HostShare, interrupting: bool) -> None:
        """Makes a call of a simulated slow server as long as it has to be; others have their turns meanwhile."""
        given_s = 0.0 if interrupting else self._given_s
        left_s = self.pace.missing_s(slots, perf_counter() - started - given_s)
        while left_s > 0:
            step_s = min(left_s, self.shares.step_s(share))
            time.sleep(step_s)
            left_s -= step_s
            if not interrupting:
                self._give_way(share, started)


def _is_brief(request: _Request | Job) -> bool:
    return not isinstance(request, Job) and request[1].n_bytes <= request[1].owner.host.brief_bytes


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
        layers = host.layers
        if header.layer >= len(layers):
            raise ProtocolError(f"frame layer is {header.layer}, the model has {len(layers)} MoE layers")
    except CapacityError as error:
        raise _RequestError(ErrorCode.CAPACITY, str(error)) from None
    except ProtocolError as error:
        raise _RequestError(ErrorCode.BAD_FRAME, str(error)) from None
    experts = layers[header.layer]
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
