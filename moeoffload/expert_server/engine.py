"""Takes the requests of all hosts, runs the kernel, writes the replies. One thread computes at a time.

Requests wait in the queues of `fair_share`, which decides whose is next; `batcher` decides what is computed with it,
and `answers` computes. A small request (a decode step) is computed by the reader thread that received it if no other
thread computes: a hop to another thread would cost more than the rest of the path. The compute thread does everything
else. It also computes small requests while several leases are at work, since one lease's frames would otherwise wait
while their reader thread computes another's. With several hosts, long calls are sliced, and small requests of other
hosts are computed between slices.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from time import perf_counter
from typing import Final, TypeVar

import torch

from moeoffload.errors import ServerError
from moeoffload.expert_server.answers import Answers, EngineCounters
from moeoffload.expert_server.batcher import Batch
from moeoffload.expert_server.fair_share import SMALL_PRICE, FairShares, Share
from moeoffload.expert_server.requests import HostShare, Job, Request, RequestError
from moeoffload.kernels import KernelWorkspace
from moeoffload.last_resort import start_thread
from moeoffload.transport.base import OnFailure, ServerChannel, ServerSlot, Work
from moeoffload.wire import ErrorCode

RECENT_S: Final = 0.25
"""Leases take turns if the submitting lease changes twice in this time; for as long, reader threads do not compute."""
T = TypeVar("T")


class Engine:
    """Owns the compute thread and the right to compute. `submit` may be called from any thread."""

    def __init__(self, *, coalesce: bool = True) -> None:
        """``coalesce``: whether a batch may have several members."""
        self.on_failure: OnFailure = lambda text: None
        """Called if the compute thread ends with an error; nothing is computed from then on. Set before `start`."""
        self._counters = EngineCounters()
        self.kernel_workspace = KernelWorkspace()
        self.shares: FairShares[Request | Job] = FairShares()
        self._coalesces = coalesce
        self._answers = Answers(self.shares, self._counters)
        self._batch = Batch()
        self._urgent = Batch()
        """The batch that interrupts a long call."""
        self._computing = threading.Lock()
        self._wanted = threading.Event()
        """Set when the compute thread has to look at the queues; until it has, reader threads do not compute."""
        self._stopping = False
        self._failure = ""
        self._running: HostShare = Share("")
        """The host whose job or batch is being computed; then its start, and its price per second to that host."""
        self._started = 0.0
        self._price = 1.0
        self._given_s = 0.0
        """Seconds of that job or batch that went to small requests of other hosts."""
        self._last = 0
        """`id` of the last small request's lease (no reference, so nothing is kept alive); then when it took over from
        another lease, and until when leases count as taking turns (perf_counter seconds)."""
        self._turned_at = float("-inf")
        self._shared_until = 0.0
        self._thread: threading.Thread | None = None

    @property
    def counters(self) -> EngineCounters:
        """A copy of the totals so far."""
        return replace(self._counters, members=list(self._counters.members))

    def start(self) -> None:
        """Starts the compute thread."""
        self._thread = start_thread("engine", self._run, self._failed)

    def submit(self, channel: ServerChannel, slot: ServerSlot) -> Work | None:
        """Queues the request in ``slot``, whose ``owner`` is its `Request`. Returns work that the caller must do."""
        request: Request = slot.owner
        host = request.host
        if request.is_small:
            host.share.small.append(request)
            alone = self.shares.n_leases == 1 or not self._takes_turns(id(host), slot.received_at)
            if alone and not self._failure:
                return self.compute_small
        else:
            host.share.large.append(request)
        self._wake()
        return None

    def _takes_turns(self, lease: int, now: float) -> bool:
        """Notes the lease of a small request; returns whether several leases were at work in the last `RECENT_S`."""
        if lease != self._last:
            if now - self._turned_at < RECENT_S:
                self._shared_until = now + RECENT_S
            self._last, self._turned_at = lease, now
        return now < self._shared_until

    def compute_small(self) -> None:
        """Computes queued small requests, unless another thread computes: it will take them when it is done."""
        while not self._wanted.is_set() and self.shares.has_small() and self._computing.acquire(blocking=False):
            try:
                while not self._wanted.is_set() and self.shares.has_small():
                    share = self._pick()
                    if share is None or not share.small:
                        break
                    self._serve_next(share)
            finally:
                self._computing.release()

    def run(self, work: Callable[[], T], share: HostShare, timeout_s: float) -> T:
        """Runs ``work`` on the compute thread when it is this host's turn, and returns its result.
        Raises ServerError: the work was not done within ``timeout_s``, or the host's lease ended; and whatever ``work``
        raises."""
        job = Job(work)
        with self.shares.lock:  # `leave` holds it, too: it cancels what is queued, and nothing is queued after it
            if not share.n_users:
                raise ServerError(self._failure or "the lease ended")
            share.large.append(job)
        self._wake()
        try:
            result: T = job.done.result(timeout_s)
        except TimeoutError:
            job.done.cancel()
            raise ServerError(f"the compute thread was busy for {timeout_s:g} s") from None
        except CancelledError:
            raise ServerError(self._failure or "the lease ended") from None
        return result

    def leave(self, share: HostShare) -> None:
        """Gives back a share from ``shares.join`` when its lease has ended. Requests left are dropped if it was the
        host's last lease."""
        for request in self.shares.leave(share):
            if isinstance(request, Job):
                request.done.cancel()

    def stop(self, timeout_s: float) -> None:
        """Finishes the requests submitted so far and ends the compute thread."""
        self._stopping = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _wake(self) -> None:
        self._wanted.set()
        if self._failure:  # checked after queueing: either `_failed` has seen the request, or this call does
            self._fail_waiting()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            with self._computing:
                self._wanted.clear()
                is_last = self._stopping  # set before `_wanted`
                while (share := self._pick()) is not None:
                    self._serve_next(share)
            if is_last:
                return
            self.compute_small()  # requests that arrived between the last look and the release of the lock

    def _failed(self, text: str) -> None:
        self._failure = text
        self._fail_waiting()
        self.on_failure(text)

    def _fail_waiting(self) -> None:
        """Fails everything that waits, since nothing is computed any more."""
        while (share := self.shares.pick()) is not None:
            request = self.shares.take(share)
            if isinstance(request, Job):
                request.done.cancel()
            elif request is not None:
                self._answers.refuse(
                    request, RequestError(ErrorCode.INTERNAL, f"this server has failed: {self._failure}")
                )

    def _pick(self) -> HostShare | None:
        """Returns the host whose turn it is, considering all requests that have arrived by now; None if none waits."""
        if self.shares.n_leases > 1:
            os.sched_yield()  # as in `pause`: lets reader threads queue what they have received
        return self.shares.pick()

    def _serve_next(self, share: HostShare) -> None:
        """Serves the next request of a host, together with the requests that can join it."""
        request = self.shares.take(share)
        if request is None:
            return
        self._running, self._started, self._given_s = share, perf_counter(), 0.0
        self._price = SMALL_PRICE if request.is_small else 1.0
        if isinstance(request, Job):
            with torch.no_grad():
                request.run()
        elif not (self._coalesces and self.shares.has_any()):
            self._answers.serve(request, self.pause)
        elif self._begin(batch := self._batch, request, None):
            self._price *= batch.rows_of(share) / batch.n_rows
            self._answers.serve_batch(batch, self.pause)
            batch.charge(perf_counter() - self._started - self._given_s)
            batch.clear()
            return
        share.charge(perf_counter() - self._started - self._given_s, self._price)

    def _begin(self, batch: Batch, request: Request, interrupted: HostShare | None) -> bool:
        """Fills ``batch`` with a request and those that can join it; returns False if there is nothing to compute."""
        if request.host.closed:
            return False
        try:
            batch.begin(request, request.check())
        except Exception as error:
            self._answers.refuse(request, error)
            return False
        if self._coalesces:
            batch.collect(self.shares, interrupted)
        return True

    def pause(self) -> float:
        """Computes small requests of other hosts whose turn it is, between two slices; returns the seconds it took."""
        os.sched_yield()  # lets reader threads run that share this thread's core
        share, batch, before = self._running, self._urgent, self._given_s
        while True:
            now = perf_counter()
            taken = self.shares.rival(share, share.used_s + (now - self._started - self._given_s) * self._price)
            if taken is None:
                return self._given_s - before
            rival, request = taken
            assert not isinstance(request, Job), "jobs wait with the large requests"
            if self._begin(batch, request, share):
                self._answers.serve_batch(batch, None)
                took_s = perf_counter() - now
                batch.charge(took_s)
                batch.clear()
            else:
                took_s = perf_counter() - now
                rival.charge(took_s, SMALL_PRICE)
            self._given_s += took_s
