"""One shard of the experts and all links that can compute it: its server, servers with a replica, the host itself.

The shards stay the same for the whole run, whichever link computes them. So a shard's sums are always rounded and added
in the same way, and a run that loses servers gives the same tokens as one that does not.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Final

from moeoffload.errors import DeadlineError, MoeOffloadError, ServerError
from moeoffload.host.fallback import FallbackLink
from moeoffload.host.flight import ShardLink
from moeoffload.host.link import ExpertLink

logger = logging.getLogger(__name__)

FIRST_TRY_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
IDLE_POLL_S: Final = 0.01
JOIN_S: Final = 5.0
NO_OTHER: Final = "neither another server nor the host can compute its experts"
KEPT_EVENTS: Final = 256  # the newest events; a report does not grow without bound
_COUNTED: Final = ("lost", "returned", "drained", "verified", "replica_calls", "stale", "fallback_calls")

Attach = Callable[[], ExpertLink]
"""Opens a link to a server, with its experts loaded; raises MoeOffloadError."""


@dataclass(frozen=True, slots=True)
class Event:
    """``at_s`` counts from the opening of the model; ``seconds`` is how long the server was away, or 0."""

    at_s: float
    server: str
    what: str
    why: str
    seconds: float = 0.0


class ServerEvents:
    """Server events of one open model, counted for the report, and logged. Thread-safe."""

    def __init__(self) -> None:
        self._started = perf_counter()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._away: Counter[str] = Counter()
        """By server, the number of shards that other links compute for it now; one warning covers all of them."""

    def count(self, what: str, n: int = 1) -> None:
        """Adds ``n`` to the count of ``what``; ``stale`` counts replies that came late, twice or unasked."""
        with self._lock:
            self._counts[what] += n

    def record(self, what: str, server: str, why: str, message: str, seconds: float = 0.0) -> None:
        """Adds an event: a server is no longer used (``lost``, ``drained``), or used again (``returned``).

        Logs ``message``: as a warning when the first shard moves away from ``server``, and when the last is back.
        """
        n_more = -1 if what == "returned" else 1
        with self._lock:
            self._away[server] += n_more
            is_news = self._away[server] == max(0, n_more)
            self._counts[what] += 1
            self._events.append(Event(perf_counter() - self._started, server, what, why, seconds))
        logger.log(logging.WARNING if is_news else logging.INFO, "%s", message)

    def figures(self, shards: Sequence[Shard]) -> dict[str, Any]:
        """Returns the report's figures: what was recorded, and the counts of the links of ``shards`` that are open."""
        links = [(holder.link, holder is shard.holders[0]) for shard in shards for holder in shard.holders]
        of_open = {
            "stale": sum(link.channel.n_stale for link, _ in links if link is not None),
            "replica_calls": sum(link.n_calls for link, first in links if link is not None and not first),
            "fallback_calls": sum(shard.fallback.n_calls for shard in shards if shard.fallback is not None),
        }
        with self._lock:
            counts = {name: count + of_open.get(name, 0) for name, count in self._counts.items()}
            return counts | {"events": [asdict(event) for event in self._events]}


@dataclass(eq=False)
class Holder:
    """A server that holds, or held, a shard."""

    address: str
    attach: Attach
    known: ExpertLink
    """The last link, even while the server is lost; for the report."""
    link: ExpertLink | None
    """None while it cannot be used."""
    is_missed: bool = False
    """Whether `ServerEvents` was told that it went; of a replica that was not in use it is not."""


class Shard:
    """Selects the link that computes one part of the experts. Thread-safe.

    Attributes:
        current: the link that computes them; read for every call, without a lock.
    """

    def __init__(
        self, holders: Sequence[Holder], fallback: FallbackLink | None, return_wait_s: float, events: ServerEvents,
        stopping: threading.Event,
    ) -> None:  # fmt: skip
        """``holders`` are in order of preference, all attached; without ``fallback`` the host never computes them.

        ``return_wait_s`` is how long a call waits for a lost server to return when no other link is left.
        """
        self.holders = holders
        self.fallback = fallback
        self._return_wait_s = return_wait_s
        self._events = events
        self._stopping = stopping
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)
        self._menders: list[threading.Thread] = []
        self.current: ShardLink = self.known
        for holder in holders:
            self._watch(holder.known)

    @property
    def known(self) -> ExpertLink:
        """The last link to the preferred server."""
        return self.holders[0].known

    def best(self, *, but: ShardLink | None = None) -> ShardLink | None:
        """Returns the link to prefer, of all but one: to a server, else to the host; None if there is none."""
        links: list[ShardLink | None] = [*(holder.link for holder in self.holders), self.fallback]
        return next((link for link in links if link is not None and link is not but), None)

    def replace(self, lost: ShardLink, error: ServerError) -> ShardLink:
        """Returns the link that computes from now on, after ``lost`` failed with ``error``.
        Raises ServerError: no link is left, and none came back in time."""
        deadline = perf_counter() + (0.0 if isinstance(error, DeadlineError) else self._return_wait_s)
        with self._lock:
            self._leave(lost, str(error))
            while (link := self.best()) is None or link is lost:
                left_s = deadline - perf_counter()
                if left_s <= 0 or self._stopping.is_set() or link is lost:
                    raise type(error)(f"{error}; {self._why_no_link()}") from None
                self._returned.wait(left_s)
            return link

    def retire(self, leaving: ExpertLink) -> None:
        """Moves away from a draining server: another link computes from now on; flights already sent are finished."""
        with self._lock:
            self._leave(leaving, f"{leaving.name} is draining", drains=True)

    def close(self) -> None:
        """Closes all links; the caller has set the stopping event. Idempotent."""
        with self._lock:
            self._returned.notify_all()
            links = [holder.link for holder in self.holders if holder.link is not None]
            menders = list(self._menders)
        for link in links:
            link.close()
        for mender in menders:
            mender.join(JOIN_S)

    # -- with the lock held

    def _leave(self, link: ShardLink, why: str, *, drains: bool = False) -> None:
        """Selects another link in place of ``link``, whose server is lost or ``drains``, and begins to get it back."""
        holder = next((holder for holder in self.holders if holder.link is link), None)
        if holder is None or holder.link is None or self._stopping.is_set():
            return  # another thread was first, or the run is over
        gone, holder.link = holder.link, None
        chosen = self.best()
        if chosen is None and drains:
            holder.link = gone  # the run may go on there until the server's drain limit
            logger.warning("%s, and %s", why, NO_OTHER)
            return
        if self.current is gone:
            holder.is_missed = True
            until = f"are computed by {chosen.name}" if chosen is not None else "cannot be computed until it is back"
            event = ("drained", holder.address, "it is draining") if drains else ("lost", holder.address, why)
            self._events.record(*event, f"{why}; its experts {until}")
        else:
            logger.info("%s; it held a replica", why)
        if chosen is not None:
            self.current = chosen
        finish_s = gone.deadlines.of(gone.layout.capacity) if drains else 0.0
        self._menders = [thread for thread in self._menders if thread.is_alive()]
        name = f"mend-{holder.address}"
        mender = threading.Thread(target=self._mend, args=(holder, gone, finish_s), name=name, daemon=True)
        self._menders.append(mender)
        mender.start()

    def _why_no_link(self) -> str:
        if self._stopping.is_set():
            return "the model was closed"
        if self.fallback is None:
            return "no other server holds its experts, and the settings forbid that the host computes them"
        return NO_OTHER

    # -- called from other threads

    def _watch(self, link: ExpertLink) -> None:
        link.lease.listen(lambda why: self._ended(link, why), lambda: self.retire(link))

    def _ended(self, link: ExpertLink, why: str) -> None:
        with self._lock:
            self._leave(link, why)

    def _mend(self, holder: Holder, link: ExpertLink, finish_s: float) -> None:
        """Closes a link once its flights are done, then tries to attach to the server again until it is back."""
        gone_at = perf_counter()
        while not link.channel.is_idle and perf_counter() - gone_at < finish_s and not self._stopping.wait(IDLE_POLL_S):
            pass
        self._events.count("stale", link.channel.n_stale)
        if holder is not self.holders[0]:
            self._events.count("replica_calls", link.n_calls)
        link.close(grace_s=finish_s)
        pause_s, told = FIRST_TRY_S, ""
        while not self._stopping.wait(pause_s):
            try:
                back = holder.attach()
            except MoeOffloadError as error:
                why = str(error)
                if why != told:
                    logger.info("not back yet: %s", why)  # not the error: its traceback would keep objects alive
                told, pause_s = why, min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            except Exception:
                if not self._stopping.is_set():
                    logger.exception("expert server %s: attaching again failed", holder.address)
                pause_s = LONGEST_PAUSE_S
                continue
            self._adopt(holder, back, perf_counter() - gone_at)
            return

    def _adopt(self, holder: Holder, link: ExpertLink, away_s: float) -> None:
        with self._lock:
            is_late = self._stopping.is_set()
            if not is_late:
                holder.link = holder.known = link
                chosen = self.best()
                assert chosen is not None
                if holder.is_missed:
                    holder.is_missed = False
                    message = f"expert server {holder.address} is back after {away_s:.1f} s"
                    self._events.record("returned", holder.address, "it answers again", message, away_s)
                self.current = chosen
                self._returned.notify_all()
        if is_late:
            link.close()
        else:
            self._watch(link)  # outside the lock: it calls back at once if the link has ended again
