"""From a batch to the replies of its members: one kernel call; what is wrong with one is told to that one alone."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from time import perf_counter

import torch

from moeoffload.errors import MoeOffloadError
from moeoffload.expert_server.arena import Arena, HostArena, KernelInput
from moeoffload.expert_server.batcher import Batch
from moeoffload.expert_server.calibrate import Pace
from moeoffload.expert_server.counters import EngineCounters
from moeoffload.expert_server.fair_share import BRIEF_ROWS, FairShares
from moeoffload.expert_server.requests import (
    Job,
    Request,
    RequestError,
    SlotContext,
    check,
    write_error,
    write_sums_header,
)
from moeoffload.kernels import KernelWorkspace, LayerKernels
from moeoffload.payload import describe_bad_row
from moeoffload.wire import ErrorCode

logger = logging.getLogger(__name__)

Pause = Callable[[], float]
"""Lets brief requests of other hosts have their turn; returns the seconds it took."""


class Answers:
    """Computes batches into the reply buffers of their members and sends those. For the thread that computes."""

    def __init__(self, shares: FairShares[Request | Job], pace: Pace, counters: EngineCounters) -> None:
        self._shares = shares
        self._pace = pace
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

    @torch.inference_mode()
    def serve(self, batch: Batch, pause: Pause | None) -> None:
        """Answers all members of a batch. Without ``pause`` it interrupts another one and is not interrupted itself."""
        if len(batch.members) > 1:
            try:
                self._serve_together(batch, pause)
                return
            except Exception as error:
                # One of them is at fault, and it is not known which: each is computed and told its fate alone.
                logger.warning("a batch of %d requests is computed one by one: %s", len(batch.members), error)
        for request, n_rows in zip(batch.members, batch.rows, strict=True):
            if not request[1].owner.host.closed:
                self._serve_alone(request, n_rows, batch, pause)

    def _serve_alone(self, request: Request, n_rows: int, batch: Batch, pause: Pause | None) -> None:
        slot = request[1]
        context: SlotContext = slot.owner
        started = perf_counter()
        try:
            arena, views = context.host.workspace.arena(n_rows), context.views
            reply = views.combine(n_rows)  # the lease may end meanwhile
            call = arena.fill(views.dispatch(n_rows), n_rows, batch.weights_dtype, batch.experts.n_experts)
            given_s = self._run(batch, call, pause)
        except IndexError:
            text = f"layer {context.header.layer}: slots must be -1 to {batch.experts.n_experts - 1}"
            self._refuse(request, RequestError(ErrorCode.BAD_SLOT, text))
            return
        except Exception as error:
            self._refuse(request, error)
            return
        took_s = perf_counter() - started - given_s
        wait_s = started - slot.received_at
        self._counters.add_batch(1, wait_s, batch.collect_s, took_s)
        self._finish(request, n_rows, arena, call, reply, wait_s, given_s, took_s)

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
        given_s = self._run(batch, arena.part(0, at, weights_dtype), pause)
        took_s = perf_counter() - started - given_s
        wait_s = started - min(slot.received_at for _, slot in members)
        self._counters.add_batch(len(members), wait_s, batch.collect_s, took_s)
        for request, n_rows, part, reply in zip(members, rows, parts, replies, strict=True):
            own = request[1].owner.host.workspace.arena(n_rows)
            # Each has its part of the call; the rest of it has waited for the others.
            own_s = took_s * n_rows / at
            wait_s = started - request[1].received_at
            self._finish(request, n_rows, own, part, reply, wait_s, given_s + took_s - own_s, own_s)

    def _run(self, batch: Batch, call: KernelInput, pause: Pause | None) -> float:
        """The kernel call; returns the seconds of it that others had.

        Raises:
            IndexError: a slot that does not exist; nothing was computed.
        """
        started = perf_counter()
        experts, given_s, n_rows = batch.experts, 0.0, call.slots.shape[0]
        if pause is None:
            experts(call.rows, call.slots, call.weights, call.out, self._urgent_workspace)
        elif n_rows == 1 or self._shares.n_shares == 1 or len(batch.members) == n_rows <= BRIEF_ROWS:
            # Single rows are not interrupted for others of their kind, whether they are alone or together.
            experts(call.rows, call.slots, call.weights, call.out)
        else:
            step_s = functools.partial(self._shares.step_s, batch.lead.host.share)
            for _ in experts.in_steps(call.rows, call.slots, call.weights, call.out, step_s):
                given_s += pause()
        if self._pace.slows:
            given_s += self._hold(batch, call, started + given_s, pause)
        return given_s

    def _hold(self, batch: Batch, call: KernelInput, started: float, pause: Pause | None) -> float:
        """Makes a call of a simulated slow server as long as it has to be; returns the seconds that others had."""
        left_s, given_s = self._pace.missing_s(call.slots, perf_counter() - started), 0.0
        while left_s > 0:
            step_s = min(left_s, self._shares.step_s(batch.lead.host.share))
            time.sleep(step_s)
            left_s -= step_s
            if pause is not None:
                given_s += pause()
        return given_s

    def _finish(
        self,
        request: Request,
        n_rows: int,
        arena: Arena,
        call: KernelInput,
        reply: torch.Tensor,
        wait_s: float,
        others_s: float,
        compute_s: float,
    ) -> None:
        """Sends a member its sums, or says what is wrong with them."""
        slot = request[1]
        context: SlotContext = slot.owner
        if context.host.closed:
            return
        try:
            bad = arena.finish(call, reply)
            if bad is not None:
                what = describe_bad_row(call.out[bad], context.host.layout.dtype_back)
                raise RequestError(ErrorCode.PAYLOAD, what, bad)
            n_bytes = write_sums_header(slot, context, wait_s + others_s, compute_s)
        except Exception as error:
            self._refuse(request, error)
            return
        counters = self._counters
        counters.requests += 1
        counters.rows += n_rows
        counters.queue_s += wait_s
        self._send(request, n_bytes)

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
