"""How many rows of a layer go into one dispatch, and how a long prompt is chunked: the mode, and both sides' caps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from moeoffload.config import Mode, Pipeline
from moeoffload.kernels.attention import takes_many
from moeoffload.native import Features, cpu_features

# Smaller chunks overlap better, but below these sizes reading the experts' weights serves too few rows. Measured on
# CPUs with prompts of 512 to 4,248 tokens.
CHUNK_ROWS: Final = 512
MASKED_CHUNK_ROWS: Final = 256
"""Used where attention also computes scores that the causal mask then hides: smaller chunks waste less."""
LEAST_CHUNK_ROWS: Final = 128
GPU_HOST_CHUNKS: Final = 4
"""Number of chunks on a GPU host, where attention takes little time and servers gain from large products."""


def chunk_rows(device: torch.device, dtype: torch.dtype, *, fast_dense: bool) -> int | None:
    """Returns the approximate chunk length for prompts on a host; None if they are cut into GPU_HOST_CHUNKS."""
    if device.type != "cpu":
        return None
    skips = fast_dense and takes_many(dtype)
    # Servers are presumably CPUs like this one: with a matrix unit, short chunks only wait for weights to be read.
    multiplies = dtype == torch.bfloat16 and Features.MATRIX_UNIT in cpu_features()
    return CHUNK_ROWS if skips or multiplies else MASKED_CHUNK_ROWS


@dataclass(frozen=True, slots=True)
class Granularity:
    """Slice sizes of one host. ``hot_slice`` is the slice of stream mode; rows are counted per layer and server."""

    mode: Mode
    hot_slice: int
    pipeline: Pipeline = "off"
    chunk_rows: int | None = CHUNK_ROWS  # see `chunk_rows`

    def slice_rows(self, capacity: int) -> int:
        """Returns the most rows of one dispatch to a server whose effective batch capacity is ``capacity``."""
        return min(self.hot_slice, capacity) if self.mode == "stream" else capacity

    def pipeline_rows(self, n_rows: int, capacity: int) -> int | None:
        """Returns the chunk length for a prompt of ``n_rows`` tokens, given the least capacity of all servers; None: do
        not cut.

        Auto mode aims at two or more chunks of about even length, to overlap them; the other modes use the largest
        chunk that one dispatch may hold. The length never depends on measured speed: the shape of a product affects
        its rounding.
        """
        if self.pipeline == "off":
            return None
        if self.mode != "auto":
            return capacity
        n_chunks = GPU_HOST_CHUNKS if self.chunk_rows is None else max(2, round(n_rows / self.chunk_rows))
        even = -(-n_rows // n_chunks)
        return min(capacity, max(LEAST_CHUNK_ROWS, -(-even // 64) * 64))
