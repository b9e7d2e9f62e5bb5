"""From a batch to the replies of its members: one kernel call; what is wrong with one is told to that one alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from time import perf_counter

import torch

from moeoffload.errors import MoeOffloadError, ServerError
from moeoffload.expert_server.arena import HostArena, KernelInput
from moeoffload.expert_server.batcher import Batch
from moeoffload.expert_server.calibrate import Pace
from moeoffload.expert_server.counters import EngineCounters, member_class
from moeoffload.expert_server.fair_share import BRIEF_ROWS, FairShares
from moeoffload.expert_server.requests import (
    ActiveHost,
    HostShare,
    Job,
    Request,
    RequestError,
    SlotContext,
    check,
    write_error,
    write_sums_header,
)
from moeoffload.expert_server.staging import DeviceArena
from moeoffload.kernels import KernelWorkspace, LayerKernels
from moeoffload.payload import describe_bad_row
from moeoffload.transport.base import ServerSlot
from moeoffload.wire import HEADER_BYTES, ErrorCode

logger = logging.getLogger(__name__)

Pause = Callable[[], float]
"""Lets brief requests of other hosts have their turn; returns the seconds it took."""


class Answers:
    """Computes batches into the reply buffers of their members and sends those. For the thread that computes."""

    def __init__(self, shares: FairShares[Request | Job], pace: Pace, counters: EngineCounters) -> None:
        self._shares = shares
        self._pace = pace if pace.slows else None
        self._counters = counters
        self._urgent_workspace = KernelWorkspace()
        """For brief batches between the steps of a long call."""

    def admit(self, request: Request) -> LayerKernels | None:
        """The experts that a request asks for; None if it was refused, or nobody waits for it any more."""
        slot = request[1]
        context: SlotContext = slot.owner
        if context.host.closed:
            return None
        try:
            return check(slot, context)
        except Exception as error:
            self._refuse(request, error)
            return None

    def serve(self, request: Request, pause: Pause | None) -> None:
        """Answers one request. Without ``pause`` it interrupts another one and is not interrupted itself."""
        slot = request[1]
        context: SlotContext = slot.owner
        if context.host.closed:
            return
        try:
            n_bytes = self._serve_alone(slot, context, pause)
        except Exception as error:
            self._refuse(request, error)
        else:
            self._send(request, n_bytes)

    def serve_batch(self, batch: Batch, pause: Pause | None) -> None:
        """Answers all members of a batch; as `serve`."""
        self._counters.collect_s += batch.collect_s
        if len(batch.members) > 1:
            try:
                self._serve_together(batch, pause)
                return
            except Exception as error:
                # One of them is at fault, and it is not known which: each is computed and told its fate alone.
                logger.debug("a batch of %d requests is computed one by one: %s", len(batch.members), error)
        for request in batch.members:
            self.serve(request, pause)

    def _serve_alone(self, slot: ServerSlot, context: SlotContext, pause: Pause | None) -> int:
        """Computes one request into its reply buffer; returns the length of the reply frame in bytes."""
        started = perf_counter()
        n_bytes = self._serve_step(slot, context, started) if pause is not None else 0
        if n_bytes:
            return n_bytes
        experts = check(slot, context)
        call, bad, given_s = self._compute(context, experts, pause)
        if bad is not None:
            raise _bad_sums(context, call, bad)
        took_s = perf_counter() - started - given_s
        wait_s = started - slot.received_at
        self._count_alone(context.header.rows, wait_s, took_s)
        return write_sums_header(slot, context, wait_s + given_s, took_s)

    def _serve_step(self, slot: ServerSlot, context: SlotContext, started: float) -> int:
        """As `_serve_alone`, in compiled code; 0 if that is not for this request, or something is wrong with it."""
        host = context.host
        places, steps = context.places, host.steps
        # Who may be interrupted computes in steps; whoever interrupts another has a workspace of its own.
        plain = self._pace is None and (self._shares.n_shares == 1 or slot.n_bytes <= host.row_bytes)
        layers = host.layers  # the lease may end: the experts stay until this is over
        if not plain or steps is None or places is None or not layers or slot.n_bytes > host.step_bytes:
            return 0
        wait_s = started - slot.received_at
        n_bytes = steps.answer(places.request, slot.n_bytes, places.reply, wait_s)
        if n_bytes:
            n_rows = (slot.n_bytes - HEADER_BYTES) // host.layout.dispatch_row_bytes
            self._count_alone(n_rows, wait_s, perf_counter() - started)
        return n_bytes

    def _count_alone(self, n_rows: int, wait_s: float, took_s: float) -> None:
        counters = self._counters
        counters.members[0] += 1
        counters.batch_wait_s += wait_s
        counters.compute_s += took_s
        counters.requests += 1
        counters.rows += n_rows
        counters.queue_s += wait_s

    @torch.inference_mode()
    def _compute(
        self, context: SlotContext, experts: LayerKernels, pause: Pause | None
    ) -> tuple[KernelInput, int | None, float]:
        """Computes a request: what was computed, a row of sums that is not finite, and the seconds that others had."""
        host, views, n_rows = context.host, context.views, context.header.rows
        arena = host.workspace.arena(n_rows)
        reply = views.combine(n_rows)  # the lease may end meanwhile
        request_id = context.header.request_id
        call = arena.fill(views.dispatch(n_rows), n_rows, context.weights_dtype, experts.n_experts, request_id)
        given_s = self._run(experts, call, host.share, n_rows == 1, pause)
        if isinstance(arena, DeviceArena):
            self._bring_next(host, arena)
        return call, arena.finish(call, reply), given_s

    def _bring_next(self, host: ActiveHost, arena: DeviceArena) -> None:
        """While the device computes, the rows of this host's next large request come to it."""
        try:
            request = host.share.large[0]
        except IndexError:
            return
        if isinstance(request, Job):
            return
        slot = request[1]
        context: SlotContext = slot.owner
        if context.host is not host:
            return
        try:
            check(slot, context)
            n_rows = context.header.rows
            if host.workspace.arena(n_rows) is arena:
                views = context.views.dispatch(n_rows)
                arena.stage(views, n_rows, context.weights_dtype, context.header.request_id)
        except (RequestError, ServerError):
            return  # it is told so when its turn comes

    @torch.inference_mode()
    def _serve_together(self, batch: Batch, pause: Pause | None) -> None:
        """One call for all members; raises before anything was sent if it cannot be made."""
        started = perf_counter()
        members, rows, weights_dtype = batch.members, batch.rows, batch.weights_dtype
        arena = batch.lead.host.workspace.arena(batch.n_rows)
        assert isinstance(arena, HostArena), "kernels of other devices are not batch-invariant"
        parts, replies = [], []
        at = 0
        for (_, slot), n_rows in zip(members, rows, strict=True):
            views = slot.owner.views
            replies.append(views.combine(n_rows))
            parts.append(arena.gather(views.dispatch(n_rows), at, n_rows, weights_dtype))
            at += n_rows
        call = arena.part(0, at, weights_dtype)
        share = batch.lead.host.share
        # A row each of several hosts: all have waited for their turn, and nobody's is cut short for another row.
        given_s = self._run(
            batch.experts, call, share, at == len(rows) <= BRIEF_ROWS and batch.rows_of(share) == 1, pause
        )
        took_s = perf_counter() - started - given_s
        counters = self._counters
        counters.members[member_class(len(members))] += 1
        counters.batch_wait_s += started - min(slot.received_at for _, slot in members)
        counters.compute_s += took_s
        for request, n_rows, part, reply in zip(members, rows, parts, replies, strict=True):
            slot = request[1]
            context: SlotContext = slot.owner
            if context.host.closed:
                continue
            # Each has its part of the call; the rest of it has waited for the others.
            own_s = took_s * n_rows / at
            wait_s = started - slot.received_at
            try:
                bad = context.host.workspace.arena(n_rows).finish(part, reply)
                if bad is not None:
                    raise _bad_sums(context, part, bad)
                n_bytes = write_sums_header(slot, context, wait_s + given_s + took_s - own_s, own_s)
            except Exception as error:
                self._refuse(request, error)
                continue
            counters.requests += 1
            counters.rows += n_rows
            counters.queue_s += wait_s
            self._send(request, n_bytes)

    def _run(
        self, experts: LayerKernels, call: KernelInput, share: HostShare, in_one_go: bool, pause: Pause | None
    ) -> float:
        """The kernel call in the turn of this host; returns the seconds of it that others had."""
        started = perf_counter() if self._pace is not None else 0.0
        given_s = 0.0
        try:
            if pause is None:
                experts(call.rows, call.slots, call.weights, call.out, self._urgent_workspace)
            elif in_one_go or self._shares.n_shares == 1:
                experts(call.rows, call.slots, call.weights, call.out)
            else:
                for _ in experts.in_slices(call.rows, call.slots, call.weights, call.out):
                    given_s += pause()
        except IndexError:
            raise _bad_slots(experts) from None
        if self._pace is not None:
            left_s = self._pace.missing_s(call.slots, perf_counter() - started - given_s)
            given_s += self._hold(left_s, share, pause)
        return given_s

    def _hold(self, left_s: float, share: HostShare, pause: Pause | None) -> float:
        """Makes a call of a simulated slow server as long as it has to be; returns the seconds that others had."""
        given_s = 0.0
        while left_s > 0:
            step_s = min(left_s, self._shares.step_s(share))
            time.sleep(step_s)
            left_s -= step_s
            if pause is not None:
                given_s += pause()
        return given_s

    def _refuse(self, request: Request, error: Exception) -> None:
        """Tells a host what was wrong with its request, or with this server."""
        slot = request[1]
        context: SlotContext = slot.owner
        self._counters.errors += 1
        if isinstance(error, RequestError):
            logger.warning("epoch %d: request refused: %s", context.host.epoch, error)
            code, text, row = error.code, str(error), error.row
        elif context.host.closed:  # its buffers went while it was computed; nobody waits for this
            code, text, row = ErrorCode.DRAINING, "the lease has ended", 0
        else:
            logger.error("epoch %d: request failed", context.host.epoch, exc_info=error)
            code, text, row = ErrorCode.INTERNAL, f"{type(error).__name__}: {error}", 0
        try:
            n_bytes = write_error(slot, context.header, code, text, row)
        except Exception as reason:  # a host can spoil the memory it shares; other hosts are served on
            logger.warning("epoch %d: reply not sent: %s", context.host.epoch, reason)
            return
        self._send(request, n_bytes)

    def _send(self, request: Request, n_bytes: int) -> None:
        channel, slot = request
        try:
            channel.reply(slot, n_bytes)
        except MoeOffloadError as error:
            logger.warning("epoch %d: reply not sent: %s", slot.owner.host.epoch, error)
        except Exception:  # a host can spoil the semaphores it shares; other hosts are served on
            logger.exception("epoch %d: reply not sent", slot.owner.host.epoch)


def _bad_slots(experts: LayerKernels) -> RequestError:
    return RequestError(ErrorCode.BAD_SLOT, f"slots must be -1 to {experts.n_experts - 1}")


def _bad_sums(context: SlotContext, call: KernelInput, row: int) -> RequestError:
    """What is wrong with a row of the sums."""
    return RequestError(ErrorCode.PAYLOAD, describe_bad_row(call.out[row], context.host.layout.dtype_back), row)
