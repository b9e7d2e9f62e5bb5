"""From a batch to the replies of its members: one kernel call; what is wrong with one is told to that one alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

import torch

from moeoffload.errors import MoeOffloadError
from moeoffload.expert_server.arena import HostArena, KernelInput
from moeoffload.expert_server.batcher import Batch
from moeoffload.expert_server.counters import EngineCounters
from moeoffload.expert_server.fair_share import SMALL_ROWS, FairShares
from moeoffload.expert_server.requests import Job, Request, RequestError, SlotContext, check, write_sums_header
from moeoffload.kernels import KernelWorkspace, LayerKernels
from moeoffload.payload import describe_bad_row
from moeoffload.transport.base import write_error_frame
from moeoffload.wire import ErrorCode

logger = logging.getLogger(__name__)

Pause = Callable[[], float]
"""Computes small requests of other hosts whose turn it is; returns the seconds it took."""


class Answers:
    """Computes batches into the reply buffers of their members and sends those. For the thread that computes."""

    def __init__(self, shares: FairShares[Request | Job], counters: EngineCounters) -> None:
        self._shares = shares
        self._counters = counters
        self._urgent_workspace = KernelWorkspace()
        """For small batches between the slices of a long call."""

    def admit(self, request: Request) -> LayerKernels | None:
        """The experts that a request asks for; None if it was refused, or its host is gone."""
        if request[1].owner.host.closed:
            return None
        try:
            return check(request)
        except Exception as error:
            self.refuse(request, error)
            return None

    def serve(self, request: Request, pause: Pause | None) -> None:
        """Answers one request. Without ``pause`` it interrupts another one and is not interrupted itself."""
        slot = request[1]
        context: SlotContext = slot.owner
        if context.host.closed:
            return
        try:
            n_bytes = self._compute(request, context, pause)
        except Exception as error:
            self.refuse(request, error)
        else:
            self._send(request, n_bytes)

    def serve_batch(self, batch: Batch, pause: Pause | None) -> None:
        """Answers all members of a batch; as `serve`."""
        if len(batch.members) > 1:
            try:
                self._serve_together(batch, pause)
                return
            except Exception as error:
                # One of them is at fault, and it is not known which: each is computed and told its fate alone.
                logger.debug("a batch of %d requests is computed one by one: %s", len(batch.members), error)
        for request in batch.members:
            self.serve(request, pause)

    @torch.inference_mode()
    def _compute(self, request: Request, context: SlotContext, pause: Pause | None) -> int:
        """Computes one request into its reply buffer; returns the length of the reply frame in bytes."""
        started = perf_counter()
        experts = check(request)
        slot, host, header, views = request[1], context.host, context.header, context.views
        n_rows = header.rows
        arena = host.workspace.arena
        reply = views.combine(n_rows)  # the lease may end meanwhile
        try:
            call = arena.fill(views.dispatch(n_rows), n_rows, context.weights_dtype, experts.n_experts)
        except IndexError:
            raise _bad_slots(experts) from None
        given_s = self._run(experts, call, whole=n_rows == 1, pause=pause)
        bad = arena.finish(call, reply)
        if bad is not None:
            raise _bad_sums(context, call, bad)
        took_s = perf_counter() - started - given_s
        wait_s = started - slot.received_at
        self._counters.count_batch(1, wait_s, took_s)
        self._counters.count_request(n_rows, wait_s)
        return write_sums_header(slot, context, wait_s + given_s, took_s)

    @torch.inference_mode()
    def _serve_together(self, batch: Batch, pause: Pause | None) -> None:
        """One call for all members; raises before anything was sent if it cannot be made."""
        started = perf_counter()
        members, rows, weights_dtype = batch.members, batch.rows, batch.weights_dtype
        arena = batch.lead.host.workspace.arena
        assert isinstance(arena, HostArena), "kernels of other devices are not batch-invariant"
        parts, replies = [], []
        at = 0
        for (_, slot), n_rows in zip(members, rows, strict=True):
            views = slot.owner.views
            replies.append(views.combine(n_rows))
            parts.append(arena.gather(views.dispatch(n_rows), at, n_rows, weights_dtype))
            at += n_rows
        call = arena.part(0, at, weights_dtype)
        # A row each of several hosts: all have waited for their turn, and no call is cut for one row.
        one_each = at == len(rows) <= SMALL_ROWS and batch.rows_of(batch.lead.host.share) == 1
        given_s = self._run(batch.experts, call, whole=one_each, pause=pause)
        took_s = perf_counter() - started - given_s
        self._counters.count_batch(len(members), started - min(slot.received_at for _, slot in members), took_s)
        for request, n_rows, part, reply in zip(members, rows, parts, replies, strict=True):
            slot = request[1]
            context: SlotContext = slot.owner
            if context.host.closed:
                continue
            # Each has its part of the call; the rest of it has waited for the others.
            own_s = took_s * n_rows / at
            wait_s = started - slot.received_at
            try:
                bad = context.host.workspace.arena.finish(part, reply)
                if bad is not None:
                    raise _bad_sums(context, part, bad)
                n_bytes = write_sums_header(slot, context, wait_s + given_s + took_s - own_s, own_s)
            except Exception as error:
                self.refuse(request, error)
                continue
            self._counters.count_request(n_rows, wait_s)
            self._send(request, n_bytes)

    def _run(self, experts: LayerKernels, call: KernelInput, *, whole: bool, pause: Pause | None) -> float:
        """The kernel call; returns the seconds of it in which other hosts' requests were computed.

        ``whole`` is never cut into slices; nor is the call of a lone host, nor one that interrupts another.
        """
        given_s = 0.0
        if pause is None or whole or len(self._shares.all) == 1:
            try:
                experts(*call, self._urgent_workspace if pause is None else None)
            except IndexError:
                raise _bad_slots(experts) from None
        else:
            parts = experts.in_slices(*call)
            while True:
                try:  # around the slice alone: what is computed in a pause tells its own host what is wrong
                    next(parts)
                except StopIteration:
                    break
                except IndexError:
                    raise _bad_slots(experts) from None
                given_s += pause()
        return given_s

    def refuse(self, request: Request, error: Exception) -> None:
        """Tells a host what was wrong with its request, or with this server."""
        slot = request[1]
        context: SlotContext = slot.owner
        code, text, row = ErrorCode.INTERNAL, f"{type(error).__name__}: {error}", 0
        if isinstance(error, RequestError):
            code, text, row = error.code, str(error), error.row
        elif context.host.closed:  # its buffers went while it was computed; the host is gone
            code, text = ErrorCode.DRAINING, "the lease has ended"
        if code == ErrorCode.TOO_LATE:
            self._counters.skipped += 1
            logger.debug("epoch %d: request not computed: %s", context.host.epoch, text)
        else:
            self._counters.errors += 1
            if code == ErrorCode.INTERNAL:
                logger.error("epoch %d: request failed", context.host.epoch, exc_info=error)
            elif code != ErrorCode.DRAINING:
                logger.warning("epoch %d: request refused: %s", context.host.epoch, text)
        try:
            n_bytes = write_error_frame(context.header, slot.reply, context.header.request_id, code, text, row)
        except Exception as reason:  # a host can spoil the memory it shares; other hosts are served on
            logger.warning("epoch %d: reply not sent: %s", context.host.epoch, reason)
        else:
            self._send(request, n_bytes)
        if isinstance(error, torch.AcceleratorError):
            raise error  # a GPU that has failed computes nothing more in this process: it takes no further requests

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
