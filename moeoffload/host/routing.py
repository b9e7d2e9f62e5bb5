"""Routing statistics: how often each expert of each layer was chosen; what stays on the host follows from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch

from moeoffload.checkpoint import Checkpoint
from moeoffload.errors import SettingError
from moeoffload.text import one_line

VERSION: Final = 1
MAX_BYTES: Final = 64 << 20


class RoutingCounter:
    """Counts choices; `count` is called with the ids of every layer's call."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._digest = checkpoint.digest
        self.counts = [torch.zeros(layer.n_experts, dtype=torch.int64) for layer in checkpoint.layers]
        self.n_tokens = 0

    def count(self, layer: int, ids: torch.Tensor) -> None:
        """Adds the choices ``ids`` (n, top_k) int64 of one call."""
        counts = self.counts[layer]
        counts += torch.bincount(ids.reshape(-1).cpu(), minlength=counts.numel())[: counts.numel()]
        if layer == 0:
            self.n_tokens += ids.shape[0]

    def write(self, path: Path) -> None:
        """Writes the counts as JSON: version, model digest, tokens, and one list of counts for each MoE layer."""
        data = {
            "version": VERSION,
            "model_digest": self._digest,
            "tokens": self.n_tokens,
            "counts": [counts.tolist() for counts in self.counts],
        }
        path.write_text(json.dumps(data) + "\n")


def read_routing_stats(path: Path, checkpoint: Checkpoint) -> list[list[int]]:
    """The counts of a file that `RoutingCounter.write` made: how often each expert of each layer was chosen.
    Raises SettingError: the file is not one, or is of another model."""
    try:
        with path.open("rb") as stream:
            data = json.loads(stream.read(MAX_BYTES + 1)[:MAX_BYTES])
        version, digest = data["version"], str(data["model_digest"])
        counts = [[_count(count) for count in layer] for layer in data["counts"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what = one_line(repr(error), 200)
        raise SettingError(f"routing-stats: {path} is no file of `moeoffload profile` ({what})") from None
    if version != VERSION:
        raise SettingError(f"routing-stats: {path} has version {str(version)[:20]!r}, expected {VERSION}")
    if digest != checkpoint.digest:
        raise SettingError(
            f"routing-stats: {path} is of another model (digest {digest[:12]!r}, not {checkpoint.digest[:12]})"
        )
    if [len(layer) for layer in counts] != [layer.n_experts for layer in checkpoint.layers]:
        raise SettingError(f"routing-stats: {path} does not have one count for each expert")
    return counts


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:20]!r} is no count")
    return value
