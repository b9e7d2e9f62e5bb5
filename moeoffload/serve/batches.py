"""Asks expert servers, on a thread of its own, what their kernel calls were."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from moeoffload.errors import MoeOffloadError
from moeoffload.host.session import OffloadedModel

MEMBER_BOUNDS: Final = (1, 2, 3, 4, 8)
"""Of the histogram that servers give: 1, 2, 3, 4, 5 to 8, and more requests in one call."""
ASK_S: Final = 1.0  # a server that does not answer within so many seconds is left out
PAUSE_S: Final = 0.5


class BatchWatcher:
    """Keeps the newest figures by server; servers are asked only while `latest` is called. Close it."""

    def __init__(self, offloaded: OffloadedModel) -> None:
        self._offloaded = offloaded
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._asking: Future[None] | None = None
        self._asked_at = 0.0
        self._known: dict[str, dict[str, Any]] = {}

    def latest(self) -> dict[str, dict[str, Any]]:
        """By address what was told last, and asks anew; never waits. For one thread at a time."""
        idle = self._asking is None or self._asking.done()
        if idle and time.monotonic() - self._asked_at >= PAUSE_S:
            self._asked_at = time.monotonic()
            self._asking = self._pool.submit(self._ask)
        return self._known

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._pool.shutdown(cancel_futures=True)

    def _ask(self) -> None:
        known = dict(self._known)
        for link in self._offloaded.links:
            try:
                reply = link.client.stats(ASK_S)
            except MoeOffloadError:
                continue  # what it said last stays
            counts = list(reply.batches.by_members)
            if len(counts) == len(MEMBER_BOUNDS) + 1:  # not from a server that counts otherwise
                members = {"bounds": list(MEMBER_BOUNDS), "counts": counts, "total": reply.requests, "n": sum(counts)}
                batches = {"members": members, "wait_s": reply.batches.wait_seconds, "warm_bytes": reply.warm_bytes}
                tiers = reply.tiers
                batches |= {"fast_bytes": tiers.fast_bytes, "moves": tiers.moves}
                batches |= {"fast_routes": tiers.fast_routes, "slow_routes": tiers.slow_routes}
                memory = reply.memory
                batches |= {
                    "allocated_bytes": memory.allocated_bytes,
                    "reserved_bytes": memory.reserved_bytes,
                    "total_bytes": memory.total_bytes,
                }
                known[link.info.address] = batches
        self._known = known
