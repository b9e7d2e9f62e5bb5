"""All figures of a serving host as plain data: what /stats answers, and what everything that shows figures reads.

docs/monitoring.md describes every field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from moeoffload import __version__
from moeoffload.device_memory import device_memory
from moeoffload.host.counters import CallCounters, LayerTimes, add_counters
from moeoffload.host.session import OffloadedModel
from moeoffload.host.shard import Shard
from moeoffload.serve.batches import BatchWatcher
from moeoffload.serve.figures import History, figures
from moeoffload.serve.stats import ServingStats

LISTEN_S: Final = 60.0  # more than between two scrapes


def serving_snapshot(
    offloaded: OffloadedModel,
    stats: ServingStats,
    *,
    batches: Mapping[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The figures as they stand, in seconds and bytes since the model was opened; from any thread.

    ``batches`` is by address what expert servers say of their kernel calls, where that is known.
    """
    recorder = offloaded.recorder
    recorder.listen(LISTEN_S)
    total, *others = recorder.phases.values()
    for other in others:
        add_counters(total, other)
    known = batches or {}
    servers = [_server(shard, counters, known) for shard, counters in zip(offloaded.shards, total.servers, strict=True)]
    figures = stats.snapshot()
    # What the recorder has between forward passes may be idle time.
    figures["steps"] |= _parts(total.times) | {"other_s": max(0.0, figures["steps"]["seconds"] - total.forward_s)}
    return figures | {
        "version": __version__,
        "model": _model(offloaded),
        "memory": _memory(offloaded.model.device),
        "servers": servers,
        "recovery": offloaded.recovery(),
        "layers": [{"calls": times.calls} | _parts(times) for times in total.layers],
    }


class Snapshots:
    """Takes snapshots of one serving host, for several clients. For one thread."""

    def __init__(self, offloaded: OffloadedModel, stats: ServingStats, batches: BatchWatcher) -> None:
        self._offloaded = offloaded
        self._stats = stats
        self._batches = batches
        self._history = History()

    def take(self, watch: bool) -> dict[str, Any]:
        """All figures as they stand; with ``watch`` also ``now``: see `figures`."""
        snapshot = serving_snapshot(self._offloaded, self._stats, batches=self._batches.latest())
        if not watch:
            return snapshot
        self._history.add(snapshot)
        return snapshot | {"now": figures(self._history)}


def _model(offloaded: OffloadedModel) -> dict[str, Any]:
    checkpoint, reference = offloaded.checkpoint, Path(offloaded.reference)
    return {
        "name": reference.resolve().name if reference.exists() else offloaded.reference,
        "type": checkpoint.model_type,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "layers": len(checkpoint.layers),
    }


def _memory(device: torch.device) -> dict[str, Any]:
    return {"device": str(device)} | asdict(device_memory(device))


def _server(shard: Shard, counters: CallCounters, batches: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    info, (state, by) = shard.known.info, _state(shard)
    entry = asdict(info) | {"state": state, "computed_by": by} | asdict(counters)
    if info.address in batches:
        entry["batches"] = batches[info.address]
    return entry


def _state(shard: Shard) -> tuple[str, str]:
    """``up``, ``replaced`` (a replica or this host computes its experts) or ``lost``; and the name of what computes."""
    current, first = shard.current, shard.holders[0].link
    if current is first:
        return "up", current.name
    if current is shard.fallback or any(holder.link is current for holder in shard.holders):
        return "replaced", current.name
    return "lost", ""


def _parts(times: LayerTimes) -> dict[str, float]:
    """Where the seconds of layers went, or of forward passes."""
    return {
        "dense_s": times.dense_s,
        "pack_s": times.pack_s,
        "wire_s": max(0.0, times.wait_s - times.wait_queue_s - times.wait_compute_s),
        "queue_s": times.wait_queue_s,
        "compute_s": times.wait_compute_s,
        "local_s": times.local_s,
        "combine_s": times.combine_s,
    }
