"""The expert servers of one run: reaches or starts them, places the experts, attaches to all of them at once."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import torch

from moeoffload.checkpoint import Checkpoint
from moeoffload.control.credentials import HostCredentials
from moeoffload.errors import ServerError
from moeoffload.host.attach import AttachPlan, Candidate, attach, calibrate, connect, take_lease
from moeoffload.host.link import ExpertLink
from moeoffload.host.spawn import ServerSpec, SpawnedServers, default_specs
from moeoffload.payload import PayloadDtype
from moeoffload.placement import ExpertTable, MemoryOffer, batch_row_bytes, place_experts
from moeoffload.settings import HostSettings

logger = logging.getLogger(__name__)

LEAST_BATCH_ROWS: Final = 32
"""Placement leaves at least the room for a batch of this many rows on every server."""

OnProgress = Callable[[str, int, int], None]
"""Called with a server's address, its loaded bytes and its total bytes; from several threads, one at a time."""
_Result = TypeVar("_Result")


class Fleet:
    """Holds connections, leases and spawned servers; `close` ends all of them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: HostSettings,
        device: torch.device,
        payload: PayloadDtype,
        servers: Sequence[ServerSpec] | None,
    ) -> None:
        """Reaches the servers of the settings, or starts ``servers`` (default: see `default_specs`).

        Raises:
            ServerError: a required server cannot be reached, or one cannot be started.
        """
        self._checkpoint = checkpoint
        self._settings = settings
        self._device = device
        self._payload = payload
        self._stack = contextlib.ExitStack()
        try:
            self._candidates = self._find(servers)
            self._pool = ThreadPoolExecutor(max(1, len(self._candidates)), thread_name_prefix="servers")
            # Runs after the connections are closed, so that no thread can hold it up.
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
            try:
                found.append(connect(address, self._checkpoint, settings.connect_timeout_s, credentials))
            except ServerError as error:
                if settings.required:
                    for other in found:
                        other.client.close()
                    raise
                logger.warning("%s; a server on this machine takes its place", error)
                missing += 1
        specs = list(servers) if servers is not None else default_specs(settings, self._device)
        if settings.experts:
            specs = (specs or [ServerSpec("cpu")])[: min(missing, 1)]
        if specs:
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
    ) -> Future[list[ExpertLink]]:
        """Places ``experts`` (those of each MoE layer that are not on the host) and starts to load them everywhere.

        ``usage`` is how often each expert was chosen, see `place_experts`.

        Raises:
            PlacementError: they do not fit.
            ServerError: a server refuses.
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
            payload=self._payload,
            settings=settings,
            device=self._device,
            on_progress=progress,
        )
        sizes = [layer.expert_bytes for layer in checkpoint.layers]
        offers = [MemoryOffer(c.address, c.info.offered_bytes - self._batch_bytes(c)) for c in self._candidates]
        # Placement is tried first without speeds: what does not fit is told before anything is loaded.
        tables = place_experts(experts, sizes, offers)
        if len(offers) > 1:
            tables = place_experts(experts, sizes, offers, self._speeds(plan), usage)
        # Servers that placement gave nothing are left alone.
        used = [(c, table) for c, table in zip(self._candidates, tables, strict=True) if table.n_experts]
        futures = [self._pool.submit(self._attach_one, candidate, table, plan) for candidate, table in used]
        return _gather(futures)

    def _speeds(self, plan: AttachPlan) -> list[float]:
        """Rows per second of each server; one after the other, since servers may share a device."""
        speeds = []
        for candidate in self._candidates:
            timings = self._calibrate_one(candidate, plan)
            # Every size counts the same: decode and prefill share the placement.
            per_row = sum(seconds / rows for rows, seconds in timings) / len(timings)
            logger.info("expert server %s: %.3g us per row", candidate.address, 1e6 * per_row)
            speeds.append(1 / max(per_row, 1e-9))
        return speeds

    def _calibrate_one(self, candidate: Candidate, plan: AttachPlan) -> list[tuple[int, float]]:
        lease = take_lease(candidate, plan)
        try:
            return calibrate(lease, plan)
        finally:
            lease.close()

    def _attach_one(self, candidate: Candidate, table: ExpertTable, plan: AttachPlan) -> ExpertLink:
        link = attach(candidate, table, plan)
        self._connections.callback(link.close)
        return link

    def _batch_bytes(self, candidate: Candidate) -> int:
        checkpoint = self._checkpoint
        rows = min(LEAST_BATCH_ROWS, self._settings.batch_capacity, candidate.info.batch_capacity)
        largest = max(layer.expert_bytes for layer in checkpoint.layers)
        slots = min(self._settings.slots, candidate.info.max_slots)
        return rows * batch_row_bytes(
            checkpoint.hidden_size, checkpoint.top_k, largest, checkpoint.dtype.itemsize, slots
        )

    def close(self) -> None:
        """Ends leases and connections, stops spawned servers. Idempotent."""
        self._stack.close()


def _gather(futures: list[Future[_Result]]) -> Future[list[_Result]]:
    """One future for all results, in order; it fails as soon as one of them fails."""
    gathered: Future[list[_Result]] = Future()
    lock = threading.Lock()
    n_open = len(futures)

    def finished(future: Future[_Result]) -> None:
        nonlocal n_open
        with lock:
            n_open -= 1
            if gathered.done():
                return
            if (error := future.exception()) is not None:
                gathered.set_exception(error)
            elif n_open == 0:
                gathered.set_result([each.result() for each in futures])

    if not futures:
        gathered.set_result([])
    for future in futures:
        future.add_done_callback(finished)
    return gathered
