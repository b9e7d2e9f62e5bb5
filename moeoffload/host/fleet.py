"""The expert servers of one run: connects to them or starts them, places the experts, attaches to all in parallel."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from time import monotonic, sleep
from typing import Final

from moeoffload.control.client import ControlClient
from moeoffload.control.credentials import HostCredentials
from moeoffload.errors import PlacementError, ServerError
from moeoffload.host.attach import AttachPlan, Candidate, attach, connect, describe, retry_while_busy
from moeoffload.host.fallback import ExpertCache, FallbackLink
from moeoffload.host.link import ExpertLink
from moeoffload.host.shard import Holder, ServerEvents, Shard
from moeoffload.host.spawn import Spawned, server_devices, spawned_servers
from moeoffload.host.speeds import measure, placement_speeds
from moeoffload.placement import GIB, ExpertTable, MemoryOffer, batch_row_bytes, place_experts, place_replicas

logger = logging.getLogger(__name__)

LEAST_BATCH_ROWS: Final = 32
"""Placement leaves room for a batch of at least this many rows on every server."""
AGAIN_S: Final = 2.0
"""How long a lost server may take to answer an attempt to attach again."""
LOOK_S: Final = 0.2
"""How long a signal may go unseen while servers load."""
ROOM_S: Final = 1.0
"""How long to wait before servers are asked again whether they have room."""


class Fleet:
    """Holds connections, leases and spawned servers; `close` ends all of them."""

    def __init__(self, plan: AttachPlan, *, is_needed: bool, spawned: Spawned | None = None) -> None:
        """Connects to the servers of the settings; starts some if the settings name none, or one in the place of those
        that are missing, if ``is_needed``: unless every expert is on the host. With ``spawned`` the caller has started
        them, and stops them.
        Raises ServerError: a required server cannot be reached, or one cannot be started."""
        self._plan = plan
        self._stack = contextlib.ExitStack()
        self._stopping = threading.Event()
        self._opening: set[ControlClient] = set()
        """The connections over which threads are attaching; adding, removing and copying are atomic."""
        self._attaching: list[Future[Shard]] = []
        self.events = ServerEvents()
        self._connections = contextlib.ExitStack()
        try:
            self._candidates = self._find(spawned, is_needed=is_needed)
            self._pool = ThreadPoolExecutor(max(1, len(self._candidates)), thread_name_prefix="servers")
            # Runs after the connections are closed, so that no thread can block it.
            self._stack.callback(self._pool.shutdown, cancel_futures=True)
            self._stack.push(self._connections)
        except BaseException:
            self._connections.close()
            self._stack.close()
            raise

    def _find(self, spawned: Spawned | None, *, is_needed: bool) -> list[Candidate]:
        settings, checkpoint = self._plan.settings, self._plan.checkpoint
        found: list[Candidate] = []
        missing = 0

        def reach(address: str, credentials: HostCredentials | None = None, refused_s: float | None = None) -> None:
            found.append(connect(address, checkpoint, settings.connect_timeout_s, credentials, refused_s))
            self._connections.callback(found[-1].client.close)

        credentials = HostCredentials.of(settings)
        for address in settings.experts:
            logger.info("reaching expert server %s, for up to %g s", address, settings.connect_timeout_s)
            try:
                reach(address, credentials, settings.refused_timeout_s)
            except ServerError as error:
                if settings.required is not False:
                    raise
                logger.warning("%s; a server on this machine takes its place", error)
                missing += 1
        if spawned is None and is_needed:
            devices = server_devices(settings, self._plan.device)
            if settings.experts:
                devices = devices[: min(missing, 1)]
            if devices:
                spawned = self._stack.enter_context(spawned_servers(settings, devices))
        if spawned is not None:
            for started in spawned():
                reach(started)
        return found

    def attach(self, experts: Sequence[Sequence[int]], usage: Sequence[Sequence[int]] | None = None) -> None:
        """Places ``experts`` (those of each MoE layer that are not on the host) and starts to load them everywhere.

        ``usage`` is how often each expert was chosen; see `place_experts`.
        Waits for up to `connect_timeout_s` while other hosts' experts leave no room.
        Raises PlacementError: they do not fit; ServerError: a server refuses.
        """
        checkpoint, settings = self._plan.checkpoint, self._plan.settings
        sizes = [layer.expert_bytes for layer in checkpoint.layers]
        copies = settings.replicas
        deadline, is_told = monotonic() + settings.connect_timeout_s, False
        while True:
            offers = [
                MemoryOffer(c.address, c.info.offered_bytes - copies * self._batch_bytes(c)) for c in self._candidates
            ]
            # Each server holds about ``copies`` times its own share: its experts and replicas of others'.
            own = [MemoryOffer(offer.name, offer.n_bytes // copies) for offer in offers]
            try:
                # Without speeds first: experts that do not fit are reported before any server loads some to be timed.
                tables = place_experts(experts, sizes, own)
                break
            except PlacementError:
                others_gib = sum(candidate.info.resident_bytes for candidate in self._candidates) / GIB
                if not others_gib or monotonic() >= deadline:
                    raise
            if not is_told:
                logger.warning("no room for the experts: other hosts use %.4g GiB of the servers; waiting", others_gib)
                is_told = True
            sleep(ROOM_S)
            self._candidates = [
                replace(each, info=describe(each.client, checkpoint, settings.connect_timeout_s))
                for each in self._candidates
            ]
        if len(offers) > 1:
            tables = place_experts(experts, sizes, own, self._speeds(), usage)
        holders = place_replicas(tables, sizes, offers, copies)
        cache = None  # for the experts of lost servers, unless the settings forbid that the host computes them
        if settings.fallback_gib and not settings.required:
            cache = ExpertCache(checkpoint, int(settings.fallback_gib * GIB), self._plan.device)
        # Servers without experts are not attached to.
        self._attaching = [
            self._pool.submit(self._open_shard, table, [self._candidates[i] for i in servers], cache)
            for table, servers in zip(tables, holders, strict=True)
            if table.n_experts
        ]
        # These connections are no longer needed: each attach opens its own. They are closed in the pool's threads,
        # which no signal interrupts, after the attaches: closing takes gRPC longer than attaching to a warm server.
        for candidate in self._candidates:
            self._pool.submit(candidate.client.close)

    def shards(self) -> list[Shard]:
        """Waits until all servers hold what `attach` gave them. Raises ServerError: one of them failed."""
        waiting: Collection[Future[Shard]] = self._attaching
        while waiting:
            # A signal that comes just before the main thread begins to wait is handled only when that wait ends.
            done, waiting = wait(self._attaching, LOOK_S, FIRST_EXCEPTION)
            for future in done:
                future.result()  # a failure is raised without waiting for servers that are still loading
        return [future.result() for future in self._attaching]

    def _speeds(self) -> list[float]:
        """Times the servers; returns the speeds that placement uses."""
        plan, timeout_s = self._plan, self._plan.settings.connect_timeout_s
        with contextlib.ExitStack() as leases:
            servers = []
            for candidate in self._candidates:
                lease = retry_while_busy(functools.partial(candidate.client.attach, timeout_s), timeout_s)
                leases.callback(lease.close)
                servers.append(functools.partial(lease.calibrate, plan.model, plan.settings.load_timeout_s))
            timings, equal = measure(servers, [candidate.address for candidate in self._candidates])
        return placement_speeds(timings, equal)

    def _open_shard(self, table: ExpertTable, servers: list[Candidate], cache: ExpertCache | None) -> Shard:
        """Attaches to every server that is to hold ``table``; the first one computes it."""
        settings = self._plan.settings
        holders: list[Holder] = []
        kernel = ""
        with contextlib.ExitStack() as links:
            for server in servers:
                link = self._attach(server, table, kernel, settings.connect_timeout_s)
                links.callback(link.close)
                # Replicas must use the same kernel: another one rounds differently.
                kernel = link.info.kernel
                again_s = min(AGAIN_S, settings.connect_timeout_s)
                again = functools.partial(self._attach, server, table, kernel, again_s)
                holders.append(Holder(server.address, again, link, link))
            fallback = FallbackLink(table, cache, holders[0].known.layout) if cache is not None else None
            shard = Shard(holders, fallback, settings.dispatch_floor_s, self.events, self._stopping)
            self._connections.callback(shard.close)
            if not self._stopping.is_set():
                links.pop_all()
        return shard

    def _attach(self, server: Candidate, table: ExpertTable, kernel: str, timeout_s: float) -> ExpertLink:
        """Connects to a server once more and opens a link; closing the fleet aborts it."""
        client = ControlClient(server.address, server.credentials)
        self._opening.add(client)
        try:
            if self._stopping.is_set():
                client.close()
            candidate = connect(server.address, self._plan.checkpoint, timeout_s, server.credentials, client=client)
            return attach(candidate, table, self._plan, kernel=kernel, timeout_s=timeout_s)
        finally:
            self._opening.discard(client)

    def _batch_bytes(self, candidate: Candidate) -> int:
        checkpoint, settings = self._plan.checkpoint, self._plan.settings
        rows = min(LEAST_BATCH_ROWS, settings.usual_rows, candidate.info.batch_capacity)
        widest = max(layer.intermediate for layer in checkpoint.layers)
        slots = min(settings.slots, candidate.info.max_slots)
        return rows * batch_row_bytes(
            checkpoint.hidden_size, checkpoint.top_k, widest, checkpoint.dtype.itemsize, slots
        )

    def close(self) -> None:
        """Ends leases and connections, aborts links that are being opened, stops spawned servers. Idempotent."""
        self._stopping.set()
        for client in tuple(self._opening):
            client.close()
        self._stack.close()
