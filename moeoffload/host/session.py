"""Opens a model with its routed experts on servers: from settings to an ordinary transformers model, and back."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from moeoffload.checkpoint import Checkpoint
from moeoffload.devices import device_name, resolve_device
from moeoffload.errors import ServerError
from moeoffload.host.attach import AttachPlan, Candidate, attach, connect
from moeoffload.host.dispatcher import Dispatcher
from moeoffload.host.granularity import Granularity
from moeoffload.host.link import ExpertLink
from moeoffload.host.model import bind_experts, load_dense_model, load_tokenizer
from moeoffload.host.pipeline import PrefillPipeline
from moeoffload.host.recorder import Recorder
from moeoffload.host.report import ModelFacts, Report, RunFacts
from moeoffload.host.spawn import ServerSpec, SpawnedServers, default_specs
from moeoffload.payload import PayloadDtype
from moeoffload.placement import MemoryOffer, batch_row_bytes, place_experts
from moeoffload.settings import HostSettings, ModelDtypeChoice

logger = logging.getLogger(__name__)

LEAST_BATCH_ROWS: Final = 32
"""Placement leaves at least the room for a batch of this many rows on every server."""

OnProgress = Callable[[str, int, int], None]
"""Called with a server's address, its loaded bytes and its total bytes; from several threads, one at a time."""


def open_model(
    model: str | Path,
    *,
    settings: HostSettings | None = None,
    revision: str | None = None,
    servers: Sequence[ServerSpec] | None = None,
    on_progress: OnProgress | None = None,
    **keywords: Any,
) -> OffloadedModel:
    """Opens a Mixture-of-Experts model whose routed experts live on expert servers.

    Args:
        model: folder of a transformers checkpoint, or hub id.
        settings: all settings at once; or give single ones as keywords (``experts=["127.0.0.1:50051"]``,
            ``mode="batched"``, ``dtype="bf16"``, ...; docs/settings.md lists them).
        revision: branch, tag or commit of a hub id.
        servers: the servers to start when ``experts`` names none; default: one for each spare GPU, or one on the CPU.
        on_progress: told while servers load.

    Raises:
        SettingError: a setting has a value that is not allowed.
        ModelError: the model cannot be used.
        PlacementError: its experts do not fit on the servers.
        ServerError: a server cannot be reached or refuses.
    """
    if settings is not None and keywords:
        raise TypeError("give either settings or single settings as keywords, not both")
    return OffloadedModel(str(model), settings or HostSettings(**keywords), revision, servers, on_progress)


class OffloadedModel:
    """An open model; made by `open_model`. Use it in a ``with`` block, or `close` it.

    Attributes:
        model: an ordinary transformers model.
        tokenizer: its tokenizer.
        settings: the settings it was opened with.
        checkpoint: the files it came from.
        links: the expert servers, in order of placement.
    """

    def __init__(
        self,
        reference: str,
        settings: HostSettings,
        revision: str | None,
        servers: Sequence[ServerSpec] | None,
        on_progress: OnProgress | None,
    ) -> None:
        self.settings = settings
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self._device = resolve_device(settings.device, last=False)
        self.checkpoint = Checkpoint.open(reference, dtype=_model_dtype(settings), revision=revision)
        self._payload = PayloadDtype.from_label(settings.dtype.value, self.checkpoint.dtype)
        with contextlib.ExitStack() as stack:
            candidates = self._candidates(stack, servers)
            pool = ThreadPoolExecutor(len(candidates), thread_name_prefix="load")
            # Runs after the connections are closed, so that no thread can hold it up.
            stack.callback(pool.shutdown, cancel_futures=True)
            self._connections = stack.enter_context(contextlib.ExitStack())
            self.links = self._attach(pool, candidates, Path(reference), revision, on_progress)
            self._finish(stack)
            self._stack = stack.pop_all()

    def _candidates(self, stack: contextlib.ExitStack, servers: Sequence[ServerSpec] | None) -> list[Candidate]:
        """Connects to the servers of the settings; starts own ones if there are none, or if one may be replaced."""
        settings = self.settings
        found: list[Candidate] = []
        missing = 0
        for address in settings.experts:
            try:
                candidate = connect(address, self.checkpoint, settings.connect_timeout_s)
            except ServerError as error:
                if settings.required:
                    for other in found:
                        other.client.close()
                    raise
                logger.warning("%s; a server on this machine takes its place", error)
                missing += 1
            else:
                found.append(candidate)
        specs = list(servers) if servers is not None else default_specs(settings, self._device)
        if settings.experts:
            specs = (specs or [ServerSpec("cpu")])[:1] * min(missing, 1)
        if specs:
            spawned = SpawnedServers(settings, specs)
            stack.callback(spawned.close)
            found += [connect(address, self.checkpoint, settings.connect_timeout_s) for address in spawned.addresses]
        return found

    def _attach(
        self,
        pool: ThreadPoolExecutor,
        candidates: list[Candidate],
        reference: Path,
        revision: str | None,
        on_progress: OnProgress | None,
    ) -> list[ExpertLink]:
        """Places the experts, loads them on all servers at once, and the dense layers here meanwhile."""
        for candidate in candidates:
            self._connections.callback(candidate.client.close)
        checkpoint, settings = self.checkpoint, self.settings
        tables = place_experts(
            [layer.n_experts for layer in checkpoint.layers],
            [layer.expert_bytes for layer in checkpoint.layers],
            [MemoryOffer(c.address, c.info.offered_bytes - self._batch_bytes(c)) for c in candidates],
        )
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
        # Servers that placement gave nothing are left alone.
        used = [(c, table) for c, table in zip(candidates, tables, strict=True) if table.n_experts]
        futures: list[Future[ExpertLink]] = [pool.submit(attach, c, table, plan) for c, table in used]
        for future in futures:
            future.add_done_callback(self._keep)
        self.model = load_dense_model(checkpoint, self._device)
        self.tokenizer = load_tokenizer(checkpoint)
        return [future.result() for future in futures]

    def _keep(self, done: Future[ExpertLink]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._connections.callback(done.result().close)

    def _batch_bytes(self, candidate: Candidate) -> int:
        checkpoint = self.checkpoint
        rows = min(LEAST_BATCH_ROWS, self.settings.batch_capacity, candidate.info.batch_capacity)
        largest = max(layer.expert_bytes for layer in checkpoint.layers)
        slots = min(self.settings.slots, candidate.info.max_slots)
        return rows * batch_row_bytes(
            checkpoint.hidden_size, checkpoint.top_k, largest, checkpoint.dtype.itemsize, slots
        )

    def _finish(self, stack: contextlib.ExitStack) -> None:
        settings, checkpoint = self.settings, self.checkpoint
        self.recorder = Recorder(len(self.links), len(checkpoint.layers), profile=settings.profile)
        granularity = Granularity(settings.mode, settings.hot_slice, settings.pipeline)
        self.dispatcher = Dispatcher(self.links, granularity, self.recorder)
        bind_experts(self.model, checkpoint, self.dispatcher.for_layer)
        least = min((link.layout.capacity for link in self.links), default=settings.batch_capacity)
        self.pipeline = PrefillPipeline(
            self.model,
            [layer.module_name for layer in checkpoint.layers],
            self.recorder,
            lambda n_rows: granularity.pipeline_plan(n_rows, least),
            settings.dispatch_timeout_s,
        )
        stack.callback(self.pipeline.close)
        self.dispatcher.on_layer = self.pipeline.experts_asked
        stack.callback(self.recorder.watch(self.model))

    def report(self) -> Report:
        """What has been done since the model was opened (or since ``recorder.reset()``)."""
        checkpoint, settings = self.checkpoint, self.settings
        facts = ModelFacts(
            path=str(checkpoint.path),
            model_type=checkpoint.model_type,
            dtype=str(checkpoint.dtype).removeprefix("torch."),
            moe_layers=len(checkpoint.layers),
            routed_experts=sum(layer.n_experts for layer in checkpoint.layers),
            top_k=checkpoint.top_k,
            hidden_size=checkpoint.hidden_size,
            dense_bytes=checkpoint.dense_bytes,
            expert_bytes=sum(layer.n_experts * layer.expert_bytes for layer in checkpoint.layers),
        )
        run = RunFacts(
            mode=settings.mode.value,
            payload_dtype=self._payload.label,
            batch_capacity=settings.batch_capacity,
            hot_slice=settings.hot_slice,
            slots=settings.slots,
            host_device=str(self._device),
            host_device_name=device_name(self._device),
        )
        return Report.collect(facts, run, self.recorder, [(link.info, link.layout.capacity) for link in self.links])

    @property
    def pool_creations(self) -> int:
        """Frames, views and accumulators made on the host so far; stands still in steady state."""
        return self.dispatcher.n_created + sum(link.n_created for link in self.links)

    def close(self) -> None:
        """Ends all leases, stops spawned servers, frees everything. Idempotent."""
        self._stack.close()

    def __enter__(self) -> OffloadedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _model_dtype(settings: HostSettings) -> torch.dtype | None:
    if settings.model_dtype is ModelDtypeChoice.AUTO:
        return None
    return PayloadDtype[settings.model_dtype.value.upper()].torch_dtype
