"""Queued requests of all hosts for the same experts become one batch; no request waits for more to come.

A batch is what one kernel call computes. It begins with the request whose turn it is and takes what else lies in the
queues for the same resident experts, as far as the buffers of its first member hold it: their memory was counted when
that host was attached. Small requests ride with small ones, long ones with long ones: a decode step must not become as
long as somebody's prompt. Where several hosts wait, none has more rows in a batch than the first member: a host that
keeps many requests waiting does not make the calls of others longer than its own turn would be, and one that keeps many
more of them waiting than the first member's host has its calls to itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import torch

from moeoffload.expert_server.fair_share import SMALL_PRICE, SMALL_ROWS, FairShares
from moeoffload.expert_server.requests import HostShare, Job, Request, SlotContext, check, is_small
from moeoffload.kernels import LayerKernels

MORE_IN_FLIGHT: Final = 2
"""A host with so many small requests more in its queue than that of a batch's first member does not ride with it."""
COMPARABLE: Final = 4
"""A request of another host has at least that part of the first member's rows: it pays for riding with the time of the
whole call."""


@dataclass(slots=True, eq=False)
class Batch:
    """The requests of one kernel call, at least one. Made once and refilled with `begin`."""

    members: list[Request] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Of each member."""
    n_rows: int = 0
    _experts: LayerKernels | None = None
    weights_dtype: torch.dtype = torch.float32
    is_small: bool = True

    def begin(self, request: Request, experts: LayerKernels) -> None:
        """Starts with a request whose header was checked."""
        self.clear()
        self._experts = experts
        self.weights_dtype = request[1].owner.weights_dtype
        self.is_small = is_small(request)
        self._add(request)

    def _add(self, request: Request) -> None:
        n_rows = request[1].owner.header.rows
        self.members.append(request)
        self.rows.append(n_rows)
        self.n_rows += n_rows

    def clear(self) -> None:
        """Lets go of its members and of their experts: those of a host that leaves are to be freed."""
        self.members.clear()
        self.rows.clear()
        self.n_rows = 0
        self._experts = None

    @property
    def experts(self) -> LayerKernels:
        """That all members ask for; only while it has members."""
        assert self._experts is not None
        return self._experts

    @property
    def lead(self) -> SlotContext:
        """Of the member it began with, whose buffers it uses."""
        context: SlotContext = self.members[0][1].owner
        return context

    def rows_of(self, share: HostShare) -> int:
        """The rows of one host's members."""
        return sum(
            n_rows for (_, slot), n_rows in zip(self.members, self.rows, strict=True) if slot.owner.host.share is share
        )

    def take(self, queue: deque[Request | Job], least: int, room: int) -> None:
        """Takes what goes with it, ``room`` rows in all and ``least`` in each, in the order of arrival.

        Under the lock of the shares; the queue may grow meanwhile.
        """
        at = 0
        while room > 0 and at < len(queue):
            request = queue[at]
            if isinstance(request, Job) or not self._fits(request, least, room):
                at += 1
                continue
            del queue[at]
            self._add(request)
            room -= self.rows[-1]

    def _fits(self, request: Request, least: int, room: int) -> bool:
        slot = request[1]
        context: SlotContext = slot.owner
        if context.host.closed or is_small(request) != self.is_small:
            return False
        try:
            if check(request) is not self.experts:
                return False
        except Exception:  # whatever is wrong with it: it is told in its own turn, and pays for that
            return False
        return least <= context.header.rows <= room and context.weights_dtype == self.weights_dtype

    def charge(self, took_s: float) -> None:
        """Shares the time of the call out among its members' hosts, by rows."""
        price = SMALL_PRICE if self.is_small else 1.0
        for (_, slot), n_rows in zip(self.members, self.rows, strict=True):
            slot.owner.host.share.charge(took_s, price, n_rows / self.n_rows)


class Batcher:
    """Fills batches from the queues of all hosts. For the thread that computes."""

    def __init__(self, shares: FairShares[Request | Job], *, coalesce: bool) -> None:
        """``coalesce``: whether a batch may have several members."""
        self._shares = shares
        self._coalesces = coalesce

    def may_collect(self) -> bool:
        """Whether there may be more than the one request whose turn it is."""
        return self._coalesces and any(share.small or share.large for share in self._shares.all)

    def collect(self, batch: Batch, interrupted: HostShare | None = None) -> None:
        """Adds what waits for the same experts to a batch that has begun.

        ``interrupted`` is the host whose long call is interrupted for it: that one adds nothing, and the batch stays
        small. Kernels whose bits depend on the batch compute each request alone.
        """
        if not self._coalesces or not batch.experts.is_batch_invariant:
            return
        capacity = batch.lead.host.layout.capacity
        if interrupted is not None:
            capacity = min(capacity, SMALL_ROWS)
        own, lead_rows = batch.lead.host.share, batch.rows[0]
        others_wait = False
        for share in self._shares.all:
            if share is own or share is interrupted:
                continue
            if batch.is_small and len(share.small) > len(own.small) + MORE_IN_FLIGHT:
                # What it adds here makes this call longer, and what it has left is a call of its own right afterwards.
                others_wait = True
                continue
            room = min(capacity - batch.n_rows, lead_rows - batch.rows_of(share))
            self._take_of(share, batch, -(-lead_rows // COMPARABLE), room)
            others_wait = others_wait or (batch.is_small and bool(share.small))
        if batch.rows_of(own) == batch.n_rows and not others_wait:
            self._take_of(own, batch, 1, capacity - batch.n_rows)

    def _take_of(self, share: HostShare, batch: Batch, least: int, room: int) -> None:
        with self._shares.lock:
            batch.take(share.small if batch.is_small else share.large, least, room)
