"""The expert servers of one run: connects to them or starts them, places the experts, attaches to all in parallel."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

import torch

from moeoffload.checkpoint import Checkpoint
from moeoffload.config import HostSettings
from moeoffload.control.client import ControlClient
from moeoffload.control.credentials import HostCredentials
from moeoffload.errors import ServerError
from moeoffload.host.attach import AttachPlan, Candidate, attach, connect, take_lease
from moeoffload.host.expert_cache import ExpertCache
from moeoffload.host.fallback import FallbackLink
from moeoffload.host.link import ExpertLink
from moeoffload.host.server_events import ServerEvents
from moeoffload.host.shard import Holder, Shard
from moeoffload.host.spawn import ServerSpec, SpawnedServers, default_specs
from moeoffload.host.speeds import measure, placement_speeds
from moeoffload.payload import Payloads
from moeoffload.placement import GIB, ExpertTable, MemoryOffer, batch_row_bytes, place_experts, place_replicas

logger = logging.getLogger(__name__)

LEAST_BATCH_ROWS: Final = 32
"""Placement leaves room for a batch of at least this many rows on every server."""
AGAIN_S: Final = 2.0
"""How long a lost server may take to answer an attempt to attach again."""

OnProgress = Callable[[str, int, int], None]
"""Called with a server's address, its loaded bytes and its total bytes; from several threads, one at a time."""


class Fleet:
    """Holds connections, leases and spawned servers; `close` ends all of them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: HostSettings,
        device: torch.device,
        payloads: Payloads,
        servers: Sequence[ServerSpec] | None,
    ) -> None:
        """Connects to the servers of the settings, or starts ``servers`` (default: see `default_specs`).
        Raises ServerError: a required server cannot be reached, or one cannot be started."""
        self._checkpoint = checkpoint
        self._settings = settings
        self._device = device
        self._payloads = payloads
        self._stack = contextlib.ExitStack()
        self._stopping = threading.Event()
        self._open_lock = threading.Lock()
        self._opening: set[ControlClient] = set()
        self._attaching: list[Future[Shard]] = []
        self.events = ServerEvents()
        try:
            self._candidates = self._find(servers)
            self._pool = ThreadPoolExecutor(max(1, len(self._candidates)), thread_name_prefix="servers")
            # Runs after the connections are closed, so that no thread can block it.
            self._stack.callback(self._pool.shutdown, cancel_futures=True)
            self._connections = self._stack.enter_context(contextlib.ExitStack())
            for candidate in self._candidates:
                self._connections.callback(candidate.client.close)
        except BaseException:
            self._stack.close()
            raise

    def _find(self, servers: Sequence[ServerSpec] | None) -> list[Candidate]:
        settings = self._settings
        found: list[Candidate] = []
        missing = 0
        credentials = HostCredentials.of(settings)
        for address in settings.experts:
            logger.info("reaching expert server %s, for up to %g s", address, settings.connect_timeout_s)
            try:
                times = settings.connect_timeout_s, credentials, settings.refused_timeout_s
                found.append(connect(address, self._checkpoint, *times))
            except ServerError as error:
                if settings.required is not False:
                    for other in found:
                        other.client.close()
                    raise
                logger.warning("%s; a server on this machine takes its place", error)
                missing += 1
        specs = list(servers) if servers is not None else default_specs(settings, self._device)
        if settings.experts:
            specs = (specs or [ServerSpec("cpu")])[: min(missing, 1)]
        if specs:
            logger.info("starting %s", ", ".join(f"an expert server on {spec.device}" for spec in specs))
            spawned = SpawnedServers(settings, specs)
            self._stack.callback(spawned.close)
            found += [connect(address, self._checkpoint, settings.connect_timeout_s) for address in spawned.addresses]
        return found

    def attach(
        self,
        experts: Sequence[Sequence[int]],
        reference: Path,
        revision: str | None,
        on_progress: OnProgress | None,
        usage: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Places ``experts`` (those of each MoE layer that are not on the host) and starts to load them everywhere.

        ``usage`` is how often each expert was chosen; see `place_experts`.
        Raises PlacementError: they do not fit; ServerError: a server refuses.
        """
        checkpoint, settings = self._checkpoint, self._settings
        told = threading.Lock()

        def progress(address: str, loaded: int, total: int) -> None:
            if on_progress is not None:
                with told:
                    on_progress(address, loaded, total)

        plan = AttachPlan(
            checkpoint=checkpoint,
            reference=str(reference.absolute()) if reference.exists() else str(reference),
            revision=revision or "",
            payloads=self._payloads,
            settings=settings,
            device=self._device,
            on_progress=progress,
        )
        sizes = [layer.expert_bytes for layer in checkpoint.layers]
        copies = settings.replicas
        offers = [
            MemoryOffer(c.address, c.info.offered_bytes - copies * self._batch_bytes(c)) for c in self._candidates
        ]
        # Each server holds about ``copies`` times its own share: its experts and replicas of others'.
        own = [MemoryOffer(offer.name, offer.n_bytes // copies) for offer in offers]
        # Placed without speeds first: experts that do not fit are reported before any server loads some to be timed.
        tables = place_experts(experts, sizes, own)
        if len(offers) > 1:
            tables = place_experts(experts, sizes, own, self._speeds(plan), usage)
        holders = place_replicas(tables, sizes, offers, copies)
        cache = self._cache()
        # Servers without experts are not attached to.
        self._attaching = [
            self._pool.submit(self._open_shard, table, [self._candidates[i] for i in servers], plan, cache)
            for table, servers in zip(tables, holders, strict=True)
            if table.n_experts
        ]
        # These connections are no longer needed: each attach opens its own. They are closed in the pool's threads,
        # which no signal interrupts, after the attaches: closing takes gRPC longer than attaching to a warm server.
        for candidate in self._candidates:
            self._pool.submit(candidate.client.close)

    def shards(self) -> list[Shard]:
        """Waits until all servers hold what `attach` gave them. Raises ServerError: one of them failed."""
        done, _ = wait(self._attaching, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()  # a failure is raised without waiting for servers that are still loading
        return [future.result() for future in self._attaching]

    def _cache(self) -> ExpertCache | None:
        """Returns the cache in which the host computes experts of lost servers; None if the settings forbid it."""
        settings = self._settings
        if settings.required or not settings.fallback_gib:
            return None
        return ExpertCache(self._checkpoint, int(settings.fallback_gib * GIB), self._device)

    def _speeds(self, plan: AttachPlan) -> list[float]:
        """Times the servers; returns the speeds that placement uses."""
        with contextlib.ExitStack() as leases:
            servers = []
            for candidate in self._candidates:
                lease = take_lease(candidate, plan.settings.connect_timeout_s)
                leases.callback(lease.close)
                servers.append(functools.partial(lease.calibrate, plan.model, plan.settings.load_timeout_s))
            timings, equal = measure(servers, [candidate.address for candidate in self._candidates])
        return placement_speeds(timings, equal)

    def _open_shard(
        self, table: ExpertTable, servers: list[Candidate], plan: AttachPlan, cache: ExpertCache | None
    ) -> Shard:
        """Attaches to every server that is to hold ``table``; the first one computes it."""
        settings = self._settings
        n_experts = [layer.n_experts for layer in self._checkpoint.layers]
        holders: list[Holder] = []
        kernel = ""
        with contextlib.ExitStack() as links:
            for server in servers:
                link = self._attach(server, table, plan, kernel, settings.connect_timeout_s)
                links.callback(link.close)
                # Replicas must use the same kernel: another one rounds differently.
                kernel = link.info.kernel
                again_s = min(AGAIN_S, settings.connect_timeout_s)
                again = functools.partial(self._attach, server, table, plan, kernel, again_s)
                holders.append(Holder(server.address, again, link))
            fallback = None
            if cache is not None:
                fallback = FallbackLink(table, n_experts, cache, holders[0].known.layout, self._checkpoint.dtype)
            shard = Shard(table, holders, fallback, settings.dispatch_floor_s, self.events, self._stopping)
            self._connections.callback(shard.close)
            if not self._stopping.is_set():
                links.pop_all()
        return shard

    def _attach(
        self, server: Candidate, table: ExpertTable, plan: AttachPlan, kernel: str, timeout_s: float
    ) -> ExpertLink:
        """Opens a link; closing the fleet aborts it."""
        clients: list[ControlClient] = []

        def opened(client: ControlClient) -> None:
            clients.append(client)
            with self._open_lock:
                self._opening.add(client)
            if self._stopping.is_set():
                client.close()

        try:
            return attach(server, table, plan, kernel=kernel, timeout_s=timeout_s, opened=opened)
        finally:
            with self._open_lock:
                self._opening.difference_update(clients)

    def _batch_bytes(self, candidate: Candidate) -> int:
        checkpoint = self._checkpoint
        rows = min(LEAST_BATCH_ROWS, self._settings.usual_rows, candidate.info.batch_capacity)
        widest = max(layer.intermediate for layer in checkpoint.layers)
        slots = min(self._settings.slots, candidate.info.max_slots)
        return rows * batch_row_bytes(
            checkpoint.hidden_size, checkpoint.top_k, widest, checkpoint.dtype.itemsize, slots
        )

    def _stop(self) -> None:
        """Aborts links that are being opened and all attempts to reach lost servers."""
        self._stopping.set()
        with self._open_lock:
            opening = list(self._opening)
        for client in opening:
            client.close()

    def close(self) -> None:
        """Ends leases and connections, stops spawned servers. Idempotent."""
        self._stop()
        self._stack.close()
