"""Batches queued requests of all hosts for the same experts; a batch never waits for further requests to arrive.

One kernel call computes one batch. It begins with the request whose turn it is and adds queued requests for the same
resident experts, as far as they fit into the buffers of its first member: that memory was counted when the member's
host attached. Small requests join only small ones, long ones only long ones: a decode step must not take as long as
another host's prompt. Where several hosts wait, none has more rows in a batch than the first member, so a host with
many queued requests does not make others' calls longer than its own turn would be. A host that has many more small
requests queued than the first member's host is left out: its requests become calls of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

from moeoffload.expert_server.fair_share import SMALL_PRICE, SMALL_ROWS, FairShares
from moeoffload.expert_server.requests import ActiveHost, HostShare, Job, Request
from moeoffload.kernels import LayerKernels

MORE_IN_FLIGHT: Final = 2
"""A host whose queue has more small requests than that of the first member's host by over this number is left out."""
COMPARABLE: Final = 4
"""Another host's request joins only if it has at least 1/4 of the first member's rows: it waits for the whole call."""


@dataclass(slots=True, eq=False)
class Batch:
    """The requests of one kernel call, at least one. Made once and refilled with `begin` by the computing thread."""

    members: list[Request] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Rows of each member."""
    n_rows: int = 0
    _experts: LayerKernels | None = None
    weights_dtype: torch.dtype = torch.float32
    is_small: bool = True

    def begin(self, request: Request, experts: LayerKernels) -> None:
        """Starts a batch with a request whose header has been checked."""
        self.clear()
        self._experts = experts
        self.weights_dtype = request.weights_dtype
        self.is_small = request.is_small
        self._add(request)

    def _add(self, request: Request) -> None:
        self.members.append(request)
        self.rows.append(request.header.rows)
        self.n_rows += request.header.rows

    def clear(self) -> None:
        """Drops the references to members and experts, so that those of a host that leaves can be freed."""
        self.members.clear()
        self.rows.clear()
        self.n_rows = 0
        self._experts = None

    @property
    def experts(self) -> LayerKernels:
        """The experts that all members need; only while the batch has members."""
        assert self._experts is not None
        return self._experts

    @property
    def lead(self) -> ActiveHost:
        """The host of the first member, whose buffers the batch uses."""
        return self.members[0].host

    def rows_of(self, share: HostShare) -> int:
        """Returns the number of rows of one host's members."""
        return sum(n_rows for each, n_rows in zip(self.members, self.rows, strict=True) if each.host.share is share)

    def collect(self, shares: FairShares[Request | Job], interrupted: HostShare | None = None) -> None:
        """Adds queued requests of all hosts for the same experts to a batch that has begun.

        ``interrupted`` is the host whose long call is interrupted for this batch: it adds nothing, and the batch has at
        most `SMALL_ROWS` rows. Kernels that are not batch-invariant compute each request alone.
        """
        if not self.experts.is_batch_invariant:
            return
        capacity = self.lead.layout.capacity
        if interrupted is not None:
            capacity = min(capacity, SMALL_ROWS)
        own, lead_rows = self.lead.share, self.rows[0]
        others_wait = False
        for share in shares.all:
            if share is own or share is interrupted:
                continue
            if self.is_small and len(share.small) > len(own.small) + MORE_IN_FLIGHT:
                # Its requests would lengthen this call, and the rest of its queue would still be a call right after it.
                others_wait = True
                continue
            room = min(capacity - self.n_rows, lead_rows - self.rows_of(share))
            self._take(shares, share, -(-lead_rows // COMPARABLE), room)
            others_wait = others_wait or (self.is_small and bool(share.small))
        if self.rows_of(own) == self.n_rows and not others_wait:
            self._take(shares, own, 1, capacity - self.n_rows)

    def _take(self, shares: FairShares[Request | Job], share: HostShare, least: int, room: int) -> None:
        """Takes matching requests of a host in order of arrival: at most ``room`` rows in all, at least ``least`` in
        each. Readers may append to the queue meanwhile."""
        queue, at = share.small if self.is_small else share.large, 0
        with shares.lock:
            while room > 0 and at < len(queue):
                request = queue[at]
                if isinstance(request, Job) or not self._fits(request, least, room):
                    at += 1
                    continue
                del queue[at]
                self._add(request)
                room -= self.rows[-1]

    def _fits(self, request: Request, least: int, room: int) -> bool:
        if request.host.closed or request.is_small != self.is_small:
            return False
        try:
            if request.check() is not self.experts:
                return False
        except Exception:  # whatever is wrong is reported when it is this request's own turn, at its host's expense
            return False
        return least <= request.header.rows <= room and request.weights_dtype == self.weights_dtype

    def charge(self, took_s: float) -> None:
        """Charges the time of the call to its members' hosts, in proportion to rows."""
        price = SMALL_PRICE if self.is_small else 1.0
        for request, n_rows in zip(self.members, self.rows, strict=True):
            request.host.share.charge(took_s, price, n_rows / self.n_rows)
