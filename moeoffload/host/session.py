"""Opens a model with its routed experts on servers: from settings to an ordinary transformers model, and back."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType

from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.locate import locate
from moeoffload.config import OWN_HEAD, HostSettings
from moeoffload.devices import resolve_device
from moeoffload.host.attach import AttachPlan, OnProgress
from moeoffload.host.dispatcher import Dispatcher
from moeoffload.host.fleet import Fleet
from moeoffload.host.link import ExpertLink
from moeoffload.host.local_experts import LocalExperts
from moeoffload.host.model import bind_experts, load_draft_head, load_draft_model, load_tokenizer
from moeoffload.host.packed_dense import load_with_packed_linears
from moeoffload.host.pipeline import PrefillPipeline, chunk_rows, usual_chunk_rows
from moeoffload.host.recorder import Recorder
from moeoffload.host.report import Report, Shown, model_facts, run_facts
from moeoffload.host.rollback import prepare_rollback
from moeoffload.host.routing import read_routing_stats
from moeoffload.host.second_opinion import Verification
from moeoffload.host.shard import ServerEvents
from moeoffload.host.shared_experts import overlap_shared_experts
from moeoffload.host.spawn import Spawned
from moeoffload.host.speculative import GuessLength, most_guesses
from moeoffload.host.turns import Turns
from moeoffload.kernels.fast_dense import accelerate_dense
from moeoffload.model_name import WEIGHTS_SUFFIX
from moeoffload.payload import PayloadDtype, Payloads
from moeoffload.placement import GIB, choose_local

logger = logging.getLogger(__name__)


def open_model(
    model: str | Path,
    *,
    settings: HostSettings | None = None,
    revision: str | None = None,
    on_progress: OnProgress | None = None,
    **keywords: Any,
) -> OffloadedModel:
    """Opens a Mixture-of-Experts model whose routed experts live on expert servers.

    Args:
        model: folder of a transformers checkpoint, hub id, or a GGUF file.
        settings: all settings at once; or give single ones as keywords (``experts=["127.0.0.1:50051"]``,
            ``mode="batched"``, ``model_dtype="f32"``, ...; docs/settings.md lists them). ``model_dtype`` is what
            transformers' ``from_pretrained`` calls ``dtype``; ``dtype`` here is that of the rows that travel to
            servers. Without ``experts`` one server is started for each spare GPU, or one on the CPU.
        revision: branch, tag or commit of a hub id.
        on_progress: told while servers load.

    Raises SettingError: a setting has a value that is not allowed; ModelError: the model cannot be used;
    PlacementError: its experts do not fit on the servers; ServerError: a server cannot be reached or refuses.
    """
    if settings is not None and keywords:
        raise TypeError("give either settings or single settings as keywords, not both")
    if not isinstance(model, str | Path):
        raise TypeError(f"model: a folder, file or hub id is needed, not {type(model).__name__}")
    return OffloadedModel(str(model), settings or HostSettings(**keywords), revision, on_progress)


class _Keeper:
    """What the servers of an open model live as long as."""


class OffloadedModel(Shown):
    """An open model; made by `open_model`. Use it in a ``with`` block, or `close` it; at the latest it is closed when
    neither it nor its ``model`` is used any more.

    Attributes:
        model: an ordinary transformers model; ``reference`` is its folder, hub id or file as it was given.
        draft: the model, or the model's own draft head, that guesses tokens, or None; ``guess_length`` how many.
        shards: the parts of the experts that servers compute, in order of placement.
    """

    def __init__(
        self,
        reference: str,
        settings: HostSettings,
        revision: str | None,
        on_progress: OnProgress | None,
        spawned: Spawned | None = None,
        needs_tokenizer: bool = False,
    ) -> None:
        """``spawned`` are servers that the caller has started, and stops after this model is closed.

        With ``needs_tokenizer`` a checkpoint without one is refused.
        """
        if reference.endswith(WEIGHTS_SUFFIX):
            reference = str(locate(reference))  # as servers are told
        self.reference = reference
        self.settings = settings
        self._closed = False
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self._device = resolve_device(settings.device, last=False)
        logger.info("reading the headers of %s", reference)
        wanted, packed = settings.model_dtype, None if settings.expert_format == "keep" else settings.expert_format
        dtype = None if wanted == "auto" else PayloadDtype[wanted.upper()].torch_dtype
        self.checkpoint = Checkpoint.open(
            reference, dtype=dtype, revision=revision, expert_format=packed, dense=settings.dense
        )
        out = PayloadDtype.from_label(settings.dtype, self.checkpoint.dtype)
        back = settings.dtype_back
        if needs_tokenizer:
            _ = self.tokenizer  # what it lacks is told before anything is loaded
        self._payloads = Payloads(out, out if back == "auto" else PayloadDtype[back.upper()])
        head = self._open_draft_head()
        with contextlib.ExitStack() as stack:
            stats = settings.routing_stats
            usage = read_routing_stats(stats, self.checkpoint) if stats else None
            counts, sizes = zip(*((each.n_experts, each.expert_bytes) for each in self.checkpoint.layers), strict=True)
            local = choose_local(counts, sizes, int(settings.local_experts_gib * GIB), usage)
            remote = [
                [expert for expert in range(layer.n_experts) if expert not in set(held)]
                for layer, held in zip(self.checkpoint.layers, local.layers, strict=True)
            ]
            where = str(Path(reference).absolute()) if Path(reference).exists() else reference
            plan = AttachPlan(self.checkpoint, where, revision, self._payloads, settings, self._device, on_progress)
            fleet = Fleet(plan, is_needed=any(remote), spawned=spawned)
            stack.callback(fleet.close)
            fleet.attach(remote, usage)
            # The dense layers load while the servers load theirs.
            logger.info("loading the dense layers")
            self.model, self._dense_format = load_with_packed_linears(
                self.checkpoint, self._device, settings.dense_format
            )
            if settings.draft is not None or settings.prompt_lookup:
                prepare_rollback(self.model)
            self.draft = self._load_draft(head)
            self.guess_length = GuessLength(most_guesses(settings), adaptive=settings.adapt_guesses)
            self._local = LocalExperts(self.checkpoint, local, self._device) if local.n_experts else None
            logger.info("waiting until the servers have loaded")
            self.shards = fleet.shards()
            self._finish(stack, fleet.events)
            self._stack = stack.pop_all()
            # A caller that holds only the model can go on to use it; servers end with the last of both, and at exit.
            self._keeper = self.model.moeoffload_keeper = _Keeper()
            weakref.finalize(self._keeper, fleet.close)

    def _open_draft_head(self) -> Checkpoint | None:
        """The checkpoint's own draft head, if it is asked for; a missing one is noticed before a server is asked."""
        return self.checkpoint.draft_head() if self.settings.draft == OWN_HEAD else None

    def _load_draft(self, head: Checkpoint | None) -> Any:
        if head is not None:
            return load_draft_head(head, self.model, fast_dense=self.settings.fast_dense)
        folder = self.settings.draft
        return load_draft_model(folder, self.model) if folder is not None else None

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, read when it is asked for: a model without one can be used, too.
        Raises ModelError: the checkpoint has none that can be read."""
        return load_tokenizer(self.checkpoint)

    @property
    def links(self) -> list[ExpertLink]:
        """The expert servers, in order of placement; of a server that is lost the last link."""
        return [shard.known for shard in self.shards]

    def _finish(self, stack: contextlib.ExitStack, events: ServerEvents) -> None:
        settings, checkpoint = self.settings, self.checkpoint
        self._events = events
        self.recorder = Recorder(len(self.shards), len(checkpoint.layers), self._device, profile=settings.profile)
        if settings.report is not None:
            self.recorder.listen()
        coarsest = max(torch.finfo(checkpoint.dtype).eps, *(payload.eps for payload in self._payloads))
        self.dispatcher = Dispatcher(
            self.shards,
            settings.hot_slice if settings.mode == "stream" else settings.most_rows,
            self.recorder,
            [layer.n_experts for layer in checkpoint.layers],
            checkpoint.top_k,
            self._local,
            Verification(settings.verify_percent / 100, coarsest, events) if settings.verify_percent else None,
        )
        bind_experts(self.model, checkpoint, self.dispatcher)
        if settings.fast_dense and self._device.type == "cpu":
            accelerate_dense(self.model)
        self.dispatcher.meanwhile = overlap_shared_experts(self.model, checkpoint)
        least = min((link.layout.capacity for link in self.links), default=settings.usual_rows)
        # A half may have to wait for a dispatch, and then to read the experts of a lost server.
        self.turns = Turns(self.recorder, settings.dispatch_timeout_s + settings.load_timeout_s)
        stack.callback(self.turns.close)
        self.dispatcher.away = self.turns
        usual = usual_chunk_rows(self._device, checkpoint.dtype, fast_dense=settings.fast_dense)
        self.pipeline = PrefillPipeline(
            self.model,
            [layer.module_name for layer in checkpoint.layers],
            self.recorder,
            self.turns,
            lambda n_rows: chunk_rows(n_rows, least, usual, settings),
        )
        stack.callback(self.pipeline.close)
        for hook in self.recorder.watch(self.model):
            stack.callback(hook.remove)

    def report(self) -> Report:
        """Collects what has been done since the model was opened (or since ``recorder.reset()``)."""
        self.recorder.listen()
        run = run_facts(self.settings, self._payloads, self._device)
        model = model_facts(self.checkpoint) | {"dense_format": self._dense_format}
        return Report.collect(model, run, self.recorder, self.links, self.recovery())

    def recovery(self) -> dict[str, Any]:
        """Collects the server events so far, as the report has them."""
        return self._events.figures(self.shards)

    @property
    def pool_creations(self) -> int:
        """Frames, views and accumulators made on the host so far; stands still in steady state."""
        return self.dispatcher.n_created + sum(link.n_created for link in self.links)

    def close(self) -> None:
        """Ends all leases, stops spawned servers, frees everything. Idempotent."""
        self._closed = True
        self._stack.close()

    def table(self) -> RenderableType:
        """Returns the model, the main settings, and tables of the servers; of a closed model of those it had."""
        report = self.report()
        where = "closed" if self._closed else f"on {self._device}"
        return Group(f"{self.reference}: {report.title}, {where}", *report.server_tables())

    def __enter__(self) -> OffloadedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
