"""How many rows of a layer go into one dispatch, and how a long prompt is cut: the mode, and the caps of both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from moeoffload.config import Mode, Pipeline
from moeoffload.kernels.attention import takes_many
from moeoffload.native import Features, cpu_features

# Smaller chunks overlap better; but below these sizes the experts' weights are read for too few rows. Measured on CPUs,
# for 512 to 4,248 tokens.
CHUNK_ROWS: Final = 512
MASKED_CHUNK_ROWS: Final = 256
"""Where attention computes what a causal mask then hides, which is less in smaller chunks."""
LEAST_CHUNK_ROWS: Final = 128
GPU_HOST_CHUNKS: Final = 4
"""On a GPU host attention takes little, and servers want large products: a prompt is cut into so many chunks."""


def chunk_rows(device: torch.device, dtype: torch.dtype, *, fast_dense: bool) -> int | None:
    """About how long the chunks of a prompt are on a host; None if there are GPU_HOST_CHUNKS of them."""
    if device.type != "cpu":
        return None
    skips = fast_dense and takes_many(dtype)
    # Servers are presumably CPUs like this one: so fast that short chunks would be over before the weights are read.
    multiplies = dtype == torch.bfloat16 and Features.MATRIX_UNIT in cpu_features()
    return CHUNK_ROWS if skips or multiplies else MASKED_CHUNK_ROWS


@dataclass(frozen=True, slots=True)
class Granularity:
    """Slice sizes of one host. ``hot_slice`` is the slice of stream mode; rows are counted per layer and server."""

    mode: Mode
    hot_slice: int
    pipeline: Pipeline = Pipeline.OFF
    chunk_rows: int | None = CHUNK_ROWS  # see the function of that name

    def slice_rows(self, capacity: int) -> int:
        """Most rows in one dispatch to a server whose effective batch capacity is ``capacity``."""
        return min(self.hot_slice, capacity) if self.mode is Mode.STREAM else capacity

    def pipeline_rows(self, n_rows: int, capacity: int) -> int | None:
        """Rows of a chunk of a prompt of ``n_rows`` tokens, given the least capacity of all servers; None: do not cut.

        In auto mode there are at least two chunks to overlap, of about even length; else chunks are as large as a
        dispatch may be. The length never depends on how fast anything was: products are rounded by their shape.
        """
        if self.pipeline is Pipeline.OFF:
            return None
        if self.mode is not Mode.AUTO:
            return capacity
        n_chunks = GPU_HOST_CHUNKS if self.chunk_rows is None else max(2, round(n_rows / self.chunk_rows))
        even = -(-n_rows // n_chunks)
        return min(capacity, max(LEAST_CHUNK_ROWS, -(-even // 64) * 64))
