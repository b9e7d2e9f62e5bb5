"""Routing statistics: how often each expert of each layer was chosen. They decide which experts stay on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from moeoffload.checkpoint import Checkpoint
from moeoffload.errors import SettingError

MAX_BYTES: Final = 64 << 20


class RoutingStats(BaseModel):
    """The file format: one list of counts for each MoE layer, over ``tokens`` tokens of one model."""

    model_config = ConfigDict(strict=True)
    version: Literal[1]
    model_digest: str
    tokens: int = 0
    counts: list[list[Annotated[int, Field(ge=0, lt=1 << 62)]]]


class RoutingCounter:
    """Counts how often experts are chosen; `count` is called with the ids of every layer's call."""

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
        """Writes the counts as JSON."""
        counts = [counts.tolist() for counts in self.counts]
        data = RoutingStats(version=1, model_digest=self._digest, tokens=self.n_tokens, counts=counts)
        path.write_text(data.model_dump_json() + "\n")


def read_routing_stats(path: Path, checkpoint: Checkpoint) -> list[list[int]]:
    """Reads a file that `RoutingCounter.write` made: how often each expert of each layer was chosen.
    Raises SettingError: the file is not in this format, or is of another model."""
    try:
        with path.open("rb") as stream:
            data = RoutingStats.model_validate_json(stream.read(MAX_BYTES))
    except OSError as error:
        raise SettingError(f"routing-stats: {path} cannot be read ({error.strerror})") from None
    except ValueError:
        raise SettingError(f"routing-stats: {path} is no file of `moeoffload profile`") from None
    digest, counts = data.model_digest, data.counts
    if digest != checkpoint.digest:
        raise SettingError(
            f"routing-stats: {path} is of another model (digest {digest[:12]!r}, not {checkpoint.digest[:12]})"
        )
    if [len(layer) for layer in counts] != [layer.n_experts for layer in checkpoint.layers]:
        raise SettingError(f"routing-stats: {path} does not have one count for each expert")
    return counts
