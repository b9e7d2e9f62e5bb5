"""Takes the requests of all hosts, runs the kernel, writes the replies. One computes at a time.

Whose request is next says `fair_share`; each host's small ones come before its large ones. Large requests go through a
compute thread. A small one, a decode step, is computed by the thread that received it if nobody else computes: a hop to
another thread would cost it more than the rest of the way. With several leases at work that thread only receives, or
one's frames would wait while it computes another's; and with several hosts long calls are computed in steps, between
which brief requests of others have their turn. What is computed with the request whose turn it is says `batcher`.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from time import perf_counter
from typing import Final, Protocol, TypeVar

import torch

from moeoffload.errors import ServerError
from moeoffload.expert_server.answers import Answers
from moeoffload.expert_server.batcher import Batch, Batcher
from moeoffload.expert_server.calibrate import Pace
from moeoffload.expert_server.counters import EngineCounters
from moeoffload.expert_server.fair_share import BRIEF_PRICE, FairShares, Share
from moeoffload.expert_server.requests import HostShare, Job, Request, is_brief
from moeoffload.kernels import KernelWorkspace
from moeoffload.transport.base import ServerChannel, ServerSlot, Work

SMALL_BYTES: Final = 1 << 17
"""Frames of up to so many bytes are small."""
RECENT_S: Final = 0.25
"""Leases that go from one to another and on within so long take turns; so long after that the threads that receive do
not compute."""
_STOP: Final = None
T = TypeVar("T")


class Tallied(Protocol):
    """Whoever answers small requests between `Engine.try_begin` and `Engine.end`."""

    @property
    def totals(self) -> tuple[int, int, float]:
        """Requests and rows that were answered, and the seconds that took."""


class Engine:
    """Owns the compute thread and the right to compute. `submit` may be called from any thread."""

    def __init__(self, pace: Pace, *, coalesce: bool = True, collect_window_s: float = 0.0) -> None:
        """``coalesce`` and ``collect_window_s``: see `Batcher`."""
        self.pace = pace
        self._counters = EngineCounters()
        self.kernel_workspace = KernelWorkspace()
        self._called = ctypes.c_int64()
        """Not 0 when there is something else to do than to answer small requests of the lease at work."""
        self.call_address = ctypes.addressof(self._called)
        self._turnarounds: list[Tallied] = []
        self._counting = threading.Lock()
        self.shares: FairShares[Request | Job] = FairShares()
        self._batcher = Batcher(self.shares, coalesce=coalesce, window_s=collect_window_s)
        self._answers = Answers(self.shares, pace, self._counters)
        self._batch = Batch()
        self._urgent = Batch()
        """That interrupts a long one."""
        self._tokens: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
        """One for each request and job that the compute thread has to look for."""
        self._n_tokens = 0
        """Tokens that are not used up; each is followed by a look at the small requests."""
        self._computing = threading.Lock()
        self._running: HostShare = Share("")
        """Whose job or batch is computed; since when, and what a second of it costs that host."""
        self._started = 0.0
        self._price = 1.0
        self._given_s = 0.0
        """Seconds of it in which brief requests of other hosts had their turn."""
        self._last = 0
        """Lease of the last request, as a number that keeps nothing of it alive; when it took over from another, and
        until when they take turns (perf_counter seconds)."""
        self._turned_at = float("-inf")
        self._shared_until = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def counters(self) -> EngineCounters:
        """What was done so far, by whomever."""
        with self._counting:
            counters = replace(self._counters, members=list(self._counters.members))
            for totals in (turnaround.totals for turnaround in self._turnarounds):
                counters.add_small(*totals)
        return counters

    def add_turnaround(self, turnaround: Tallied) -> None:
        """From now on its totals count."""
        with self._counting:
            self._turnarounds.append(turnaround)

    def forget_turnaround(self, turnaround: Tallied) -> None:
        """It has ended; what it has done stays counted."""
        with self._counting:
            if turnaround in self._turnarounds:
                self._turnarounds.remove(turnaround)
                self._counters.add_small(*turnaround.totals)

    def start(self) -> None:
        """Starts the compute thread."""
        self._thread.start()

    def submit(self, channel: ServerChannel, slot: ServerSlot) -> Work | None:
        """Queues a received request; ``slot.owner`` must be its `SlotContext`. Returns what the caller has to do."""
        host = slot.owner.host
        share = host.share
        if slot.n_bytes <= SMALL_BYTES:
            share.small.append((channel, slot))
            self._called.value = 1  # whoever looks for requests at another place stops that
            alone = self.shares.n_leases == 1 or not self._takes_turns(id(host), slot.received_at)
            if alone and not self._batcher.window_s:
                return self.compute_small
            self._wake()
        else:
            share.large.append((channel, slot))
            self._wake()
        return None

    def _takes_turns(self, lease: int, now: float) -> bool:
        """Whether several leases have been at work lately."""
        if lease != self._last:
            if now - self._turned_at < RECENT_S:
                self._shared_until = now + RECENT_S
            self._last, self._turned_at = lease, now
        return now < self._shared_until

    def compute_small(self) -> None:
        """Computes the small requests that wait, unless another thread computes: that one will, when it is done."""
        while not self._n_tokens and self.shares.has_small() and self._computing.acquire(blocking=False):
            try:
                while self.shares.has_small() and (share := self._pick()) is not None and share.small:
                    self._serve_next(share)
            finally:
                self._computing.release()

    @property
    def may_turn_around(self) -> bool:
        """Whether small requests may be answered without `submit`, between `try_begin` and `end`."""
        return not self.pace.slows and not self._batcher.window_s

    def try_begin(self, lease: object) -> bool:
        """Takes the right to compute for small requests of a lease, if it is the only one at work; `end` gives it back.

        Whoever has it gives it back soon when the int64 at ``call_address`` is not 0. ``lease`` is an `ActiveHost`.
        """
        if self._n_tokens or not self._computing.acquire(blocking=False):
            return False
        # In this order: who comes queues the request first, then says so.
        self._count(0)
        alone = self.shares.n_leases == 1 or (self._last == id(lease) and perf_counter() >= self._shared_until)
        if alone and not self._called.value and not self.shares.has_small():
            return True
        self._computing.release()
        self.compute_small()
        return False

    def call(self) -> None:
        """Makes whoever has the right to compute give it back soon."""
        self._called.value = 1

    def end(self, share: HostShare, n_requests: int, took_s: float) -> None:
        """Gives the right to compute back; ``took_s`` seconds of it were for requests of this host."""
        self.shares.served_alone(share, n_requests, took_s)
        self._computing.release()
        self.compute_small()

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

    def between_calls(self, work: Callable[[], None], timeout_s: float) -> bool:
        """Runs ``work`` while nobody computes; False if somebody did for all of ``timeout_s``."""
        self._count(1)  # whoever answers small requests in a row makes room
        try:
            if not self._computing.acquire(timeout=timeout_s):
                return False
            try:
                work()
            finally:
                self._computing.release()
        finally:
            self._count(-1)
            self.compute_small()
        return True

    def pause(self) -> float:
        """Between steps of what is computed: lets brief requests of others have their turn; returns the seconds."""
        before = self._given_s
        self._give_way()
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
        self._count(1)
        self._tokens.put(True)

    def _count(self, tokens: int) -> None:
        with self._counting:
            self._n_tokens += tokens
            self._called.value = self._n_tokens

    def _run(self) -> None:
        while self._tokens.get() is not _STOP:
            with self._computing:
                # Up to one large request, for which this token may have been; small ones also have other ways.
                while (share := self._pick()) is not None and not self._serve_next(share):
                    pass
            self._count(-1)
            self.compute_small()

    def _pick(self) -> HostShare | None:
        """Whose turn it is; what has arrived by now counts."""
        if self.shares.n_leases > 1:
            os.sched_yield()  # as in `_give_way`; what they have received is then in the queues
        return self.shares.pick()

    def _serve_next(self, share: HostShare) -> bool:
        """Serves the next request of a host that waits, with what can be computed with it; whether that was large."""
        request, is_large = share.next()
        self._running, self._started, self._given_s = share, perf_counter(), 0.0
        self._price = BRIEF_PRICE if is_brief(request) else 1.0
        if isinstance(request, Job):
            with torch.inference_mode():
                request.run()
        elif not self._batcher.may_collect():
            self._answers.serve(request, self.pause)
        elif self._begin(self._batch, request, None):
            self._serve_batch(share)
            return is_large
        share.charge(perf_counter() - self._started - self._given_s, self._price)
        return is_large

    def _serve_batch(self, share: HostShare) -> None:
        """Serves the batch that was begun, in the turn of this host."""
        batch = self._batch
        self._started += batch.collect_s
        self._price *= batch.rows_of(share) / batch.n_rows
        self._answers.serve_batch(batch, self.pause)
        batch.charge(perf_counter() - self._started - self._given_s)
        batch.clear()

    def _begin(self, batch: Batch, request: Request, interrupted: HostShare | None) -> bool:
        """Makes a batch of a request and what waits for the same experts; False if there is nothing to compute."""
        experts = self._answers.admit(request)
        if experts is None:
            return False
        batch.begin(request, experts)
        self._batcher.collect(batch, interrupted)
        return True

    def _give_way(self) -> None:
        """Between two steps of a call: computes others' brief requests whose turn it is."""
        os.sched_yield()  # to the threads that receive, where this one has their core
        share, batch = self._running, self._urgent
        while True:
            now = perf_counter()
            rival = self.shares.rival(share, share.used_s + (now - self._started - self._given_s) * self._price)
            if rival is None:
                return
            request = rival.small[0]
            if isinstance(request, Job) or not is_brief(request):
                return  # it has to wait until this call is finished
            rival.next()
            if self._begin(batch, request, share):
                self._answers.serve_batch(batch, None)
                took_s = perf_counter() - now
                batch.charge(took_s)
                batch.clear()
            else:
                took_s = perf_counter() - now
                rival.charge(took_s, BRIEF_PRICE)
            self._given_s += took_s
