"""All figures of a serving host as plain data: what /stats answers, and what everything that shows figures reads.

docs/monitoring.md describes every field.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Final

import torch

from moeoffload import __version__
from moeoffload.devices import device_memory
from moeoffload.errors import MoeOffloadError
from moeoffload.host.recorder import CallCounters, LayerTimes, add_counters
from moeoffload.host.session import OffloadedModel
from moeoffload.host.shard import Shard
from moeoffload.model_name import short_name
from moeoffload.serve.figures import History, figures
from moeoffload.serve.stats import ServingStats

logger = logging.getLogger(__name__)

LISTEN_S: Final = 60.0  # more than between two scrapes
MEMBER_BOUNDS: Final = (1, 2, 3, 4, 8)
"""Of the histogram that servers give: 1, 2, 3, 4, 5 to 8, and more requests in one call."""
_OF_TIERS: Final = ("fast_bytes", "moves", "fast_routes", "slow_routes")
_OF_MEMORY: Final = ("allocated_bytes", "reserved_bytes", "total_bytes")
_ASK_S: Final = 1.0  # a server that does not answer within so many seconds is left out
_ASK_PAUSE_S: Final = 0.5


class Snapshots:
    """Takes snapshots of one serving host, for several clients. For one thread at a time. Close it.

    A thread of its own asks the expert servers what their kernel calls were, only while snapshots are taken.
    """

    def __init__(self, offloaded: OffloadedModel, stats: ServingStats) -> None:
        self._offloaded = offloaded
        self._stats = stats
        self._history = History()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._asking: Future[None] | None = None
        self._asked_at = 0.0
        self._batches: dict[str, dict[str, Any]] = {}  # by address, what each server told last

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.shutdown(cancel_futures=True)

    def take(self, watch: bool) -> dict[str, Any]:
        """All figures as they stand, in seconds and bytes since the model was opened.

        With ``watch``, which scrapers do not use, also ``now`` (see `figures`). What expert servers tell comes with
        later snapshots.
        """
        is_idle = self._asking is None or self._asking.done()
        if is_idle and time.monotonic() - self._asked_at >= _ASK_PAUSE_S:
            self._asked_at = time.monotonic()
            self._asking = self._thread.submit(self._ask_servers)
        recorder = self._offloaded.recorder
        recorder.listen(LISTEN_S)
        total, *others = recorder.phases.values()
        for other in others:
            add_counters(total, other)
        shards = zip(self._offloaded.shards, total.servers, strict=True)
        device: torch.device = self._offloaded.model.device
        snapshot = self._stats.snapshot()
        # What the recorder has between forward passes may be idle time.
        snapshot["steps"] |= _parts(total.times) | {
            "other_s": max(0.0, snapshot["steps"]["seconds"] - total.forward_s),
            "turn_s": total.turn_s,
            "beside_s": total.thread_s,
        }
        snapshot |= {
            "version": __version__,
            "model": _model(self._offloaded),
            "memory": {"device": str(device)} | asdict(device_memory(device)),
            "servers": [_server(shard, counters, self._batches) for shard, counters in shards],
            "recovery": self._offloaded.recovery(),
            "layers": [{"calls": times.calls} | _parts(times) for times in total.layers],
        }
        if not watch:
            return snapshot
        self._history.add(snapshot)
        return snapshot | {"now": figures(self._history)}

    def _ask_servers(self) -> None:
        for link in self._offloaded.links:
            try:
                reply = link.client.stats(_ASK_S)
            except MoeOffloadError:
                continue  # what it said last stays
            except Exception:  # nothing reads the result of this thread's work, and other servers still tell
                logger.exception("an expert server's figures could not be read")
                continue
            counts = list(reply.batches.by_members)
            if len(counts) != len(MEMBER_BOUNDS) + 1:
                continue  # a server that counts otherwise
            told = {
                "members": {"bounds": list(MEMBER_BOUNDS), "counts": counts, "total": reply.requests, "n": sum(counts)},
                "wait_s": reply.batches.wait_seconds,
                "warm_bytes": reply.warm_bytes,
            }
            for message, names in ((reply.tiers, _OF_TIERS), (reply.memory, _OF_MEMORY)):
                told |= {name: getattr(message, name) for name in names}
            self._batches[link.info.address] = told


def _model(offloaded: OffloadedModel) -> dict[str, Any]:
    checkpoint = offloaded.checkpoint
    return {
        "name": short_name(offloaded.reference),
        "type": checkpoint.model_type,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "layers": len(checkpoint.layers),
    }


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
