"""Computes a batch with one kernel call and replies to each member; an error is sent only to the member it concerns."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch

from moeoffload.errors import CapacityError, MoeOffloadError, ProtocolError
from moeoffload.expert_server.arena import HostArena
from moeoffload.expert_server.batcher import Batch
from moeoffload.expert_server.fair_share import SMALL_ROWS, FairShares
from moeoffload.expert_server.requests import Job, Request, RequestError
from moeoffload.kernels import KernelInput, KernelWorkspace, LayerKernels, SlotError
from moeoffload.payload import describe_bad_row
from moeoffload.wire import ErrorCode, write_error_frame

logger = logging.getLogger(__name__)

Pause = Callable[[], float]
"""Computes small requests of other hosts whose turn it is; returns the seconds that took."""


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start; times in seconds. A batch is one kernel call, for one request or several.

    Only the computing thread writes; a reader may see a call half counted.
    """

    requests: int = 0
    rows: int = 0
    errors: int = 0
    skipped: int = 0  # requests not computed because their hosts no longer waited for them
    queue_s: float = 0.0  # summed over requests, from arrival to the start of their call
    compute_s: float = 0.0
    members: list[int] = field(default_factory=lambda: [0] * 6)  # batches of 1, 2, 3, 4, 5 to 8 and more requests
    batch_wait_s: float = 0.0  # summed over batches, the wait of the member that waited longest

    def count_batch(self, n_members: int, wait_s: float, compute_s: float) -> None:
        """Counts one kernel call for ``n_members`` requests, the oldest of which had waited for ``wait_s``."""
        self.members[bisect_left((1, 2, 3, 4, 8), n_members)] += 1
        self.batch_wait_s += wait_s
        self.compute_s += compute_s

    def count_request(self, n_rows: int, wait_s: float) -> None:
        """Counts one computed request."""
        self.requests += 1
        self.rows += n_rows
        self.queue_s += wait_s


class Answers:
    """Computes batches into their members' reply buffers and sends the replies. Called by the computing thread."""

    def __init__(self, shares: FairShares[Request | Job], counters: EngineCounters) -> None:
        self._shares = shares
        self._counters = counters
        self._urgent_workspace = KernelWorkspace()
        """Kernel workspace for small batches between the slices of a long call."""

    def serve(self, request: Request, pause: Pause | None) -> None:
        """Computes and answers one request; without ``pause`` it interrupts a long call and is not interrupted."""
        if request.host.closed:
            return
        try:
            n_bytes = self._compute(request, pause)
        except Exception as error:
            self.refuse(request, error)
        else:
            self._send(request, n_bytes)

    def serve_batch(self, batch: Batch, pause: Pause | None) -> None:
        """Computes and answers all members of a batch; ``pause`` as in `serve`."""
        if len(batch.members) > 1:
            try:
                self._serve_together(batch, pause)
                return
            except Exception as error:
                # It is not known which member is at fault, so each is computed and answered alone.
                logger.debug("a batch of %d requests is computed one by one: %s", len(batch.members), error)
        for request in batch.members:
            self.serve(request, pause)

    def _compute(self, request: Request, pause: Pause | None) -> int:
        """Computes one request into its reply buffer; returns the reply frame's length in bytes."""
        started = perf_counter()
        experts = request.check()
        arena, views, n_rows = request.host.arena, request.views, request.header.rows
        reply = views.combine(n_rows)  # made before computing: the lease may end meanwhile
        call = arena.fill(views.dispatch(n_rows), n_rows, request.weights_dtype, experts.n_experts)
        given_s = self._run(experts, call, whole=n_rows == 1, pause=pause)
        bad = arena.finish(call, reply)
        if bad is not None:
            raise _bad_sums(request, call, bad)
        took_s = perf_counter() - started - given_s
        wait_s = started - request.slot.received_at
        self._counters.count_batch(1, wait_s, took_s)
        self._counters.count_request(n_rows, wait_s)
        return request.write_sums_header(wait_s + given_s, took_s)

    def _serve_together(self, batch: Batch, pause: Pause | None) -> None:
        """Computes all members in one call and sends their replies; raises before any reply was sent if it fails."""
        started = perf_counter()
        members, rows, weights_dtype = batch.members, batch.rows, batch.weights_dtype
        arena = batch.lead.arena
        assert isinstance(arena, HostArena), "kernels of other devices are not batch-invariant"
        parts, replies = [], []
        at = 0
        for request, n_rows in zip(members, rows, strict=True):
            replies.append(request.views.combine(n_rows))
            parts.append(arena.gather(request.views.dispatch(n_rows), at, n_rows, weights_dtype))
            at += n_rows
        call = arena.part(0, at, weights_dtype)
        # One row from each of several hosts: all have had to wait for a turn, and one-row calls are never sliced.
        one_each = at == len(rows) <= SMALL_ROWS and batch.rows_of(batch.lead.share) == 1
        given_s = self._run(batch.experts, call, whole=one_each, pause=pause)
        took_s = perf_counter() - started - given_s
        oldest = min(request.slot.received_at for request in members)
        self._counters.count_batch(len(members), started - oldest, took_s)
        for request, n_rows, part, reply in zip(members, rows, parts, replies, strict=True):
            if request.host.closed:
                continue
            # A member is billed for its share of the call; the rest of the call counts as waiting.
            own_s = took_s * n_rows / at
            wait_s = started - request.slot.received_at
            try:
                bad = request.host.arena.finish(part, reply)
                if bad is not None:
                    raise _bad_sums(request, part, bad)
                n_bytes = request.write_sums_header(wait_s + given_s + took_s - own_s, own_s)
            except Exception as error:
                self.refuse(request, error)
                continue
            self._counters.count_request(n_rows, wait_s)
            self._send(request, n_bytes)

    def _run(self, experts: LayerKernels, call: KernelInput, *, whole: bool, pause: Pause | None) -> float:
        """Runs the kernel call; returns how many seconds of it went to other hosts' requests.

        The call is not sliced if ``whole``, if only one host is attached, or if it interrupts another call.
        """
        if pause is None or whole or len(self._shares.all) == 1:
            experts(call, self._urgent_workspace if pause is None else None)
            return 0.0
        return sum(pause() for _ in experts.in_slices(call))

    def refuse(self, request: Request, error: Exception) -> None:
        """Answers a request with an error frame that says what is wrong with it, or with this server."""
        host, header = request.host, request.header
        code, text, row = ErrorCode.INTERNAL, f"{type(error).__name__}: {error}", 0
        if isinstance(error, RequestError):
            code, text, row = error.code, str(error), error.row
        elif isinstance(error, SlotError):
            code, text = ErrorCode.BAD_SLOT, str(error)
        elif isinstance(error, CapacityError):
            code, text = ErrorCode.CAPACITY, str(error)
        elif isinstance(error, ProtocolError):
            code, text = ErrorCode.BAD_FRAME, str(error)
        elif host.closed:  # the host left and its buffers were freed during the computation
            code, text = ErrorCode.DRAINING, "the lease has ended"
        if code == ErrorCode.TOO_LATE:
            self._counters.skipped += 1
            logger.debug("epoch %d: request not computed: %s", host.epoch, text)
        else:
            self._counters.errors += 1
            if code == ErrorCode.INTERNAL:
                logger.error("epoch %d: request failed", host.epoch, exc_info=error)
            elif code != ErrorCode.DRAINING:
                logger.warning("epoch %d: request refused: %s", host.epoch, text)
        try:
            n_bytes = write_error_frame(header, request.slot.reply, header.request_id, code, text, row)
        except Exception as reason:  # a host can corrupt the memory it shares; other hosts must still be served
            logger.warning("epoch %d: reply not sent: %s", host.epoch, reason)
        else:
            self._send(request, n_bytes)
        if isinstance(error, torch.AcceleratorError):
            raise error  # after a CUDA error this process cannot use the GPU any more: it must stop taking requests

    def _send(self, request: Request, n_bytes: int) -> None:
        try:
            request.channel.reply(request.slot, n_bytes)
        except MoeOffloadError as error:
            logger.warning("epoch %d: reply not sent: %s", request.host.epoch, error)
        except Exception:  # a host can corrupt the semaphores it shares; other hosts must still be served
            logger.exception("epoch %d: reply not sent", request.host.epoch)


def _bad_sums(request: Request, call: KernelInput, row: int) -> RequestError:
    """Returns the error for a row of sums that does not fit the payload dtype."""
    return RequestError(ErrorCode.PAYLOAD, describe_bad_row(call.out[row], request.host.layout.dtype_back), row)
