"""Times what a layer's experts take on this server, for calls of a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

import torch

from moeoffload.kernels import KernelWorkspace, LayerKernels

# Larger calls are learned when they come: timing them here would touch their workspaces and lengthen every load.
SIZES: Final = (1, 4, 16, 64, 256)
REPEATS: Final = 10
LEAST_S: Final = 0.02
"""A size is repeated for so long, even if its calls take microseconds: longer than a busy machine keeps a thread from
its core, or another one beside it."""
LONG_S: Final = 0.25
"""A size is not timed for longer than this, if it was called twice: loading should stay short."""

LARGER: Final = (2048, 4096)
"""Rows of calls that are tried on a GPU, beyond the usual batch capacity."""
GAIN: Final = 1.05
"""A larger call has to be so many times faster for each row: it takes memory, and others wait for longer."""


def best_rows(seconds: Callable[[int], float], usual: int, most: int) -> int:
    """The batch capacity of a GPU, from ``usual`` to ``most`` rows: the largest that still pays.

    ``seconds`` times a call of so many rows; one that is out of memory does not pay.
    """
    best, row_s = min(usual, most), 0.0
    for rows in (best, *(size for size in sorted({*LARGER, most}) if best < size <= most)):
        try:
            this_s = seconds(rows) / rows
        except torch.OutOfMemoryError:
            break
        if rows > best and this_s * GAIN > row_s:
            break
        best, row_s = rows, this_s
    return best


def time_layer(
    kernels: LayerKernels,
    top_k: int,
    capacity: int,
    *,
    n_experts: int,
    device: torch.device,
    workspace: KernelWorkspace,
    pause: Callable[[], float] | None = None,
    sizes: Sequence[int] = SIZES,
) -> list[tuple[int, float]]:
    """Rows and seconds of calls of several ``sizes``, of ``capacity`` rows at most.

    Each row has ``top_k`` different ones of the layer's ``n_experts``; as in a run, only those held here are computed,
    and rows without any are left out. The best of all repeats of a size counts: what the call takes, not what disturbed
    it. Runs on the thread that owns ``workspace``; calls ``pause``, if there is one, where others may compute
    meanwhile: it returns for how many seconds they did.
    """
    generator = torch.Generator().manual_seed(0)
    f32 = torch.float32  # always named: while another host's model is opened, torch's default dtype is that model's
    timings = []
    for n_rows in sorted({min(size, capacity) for size in sizes}):
        order = torch.rand(n_rows, n_experts, generator=generator, dtype=f32).argsort(dim=1)[:, :top_k]
        order[order >= kernels.n_experts] = -1
        order[0, 0] = order[0, 0].clamp(min=0)
        slots = order[(order >= 0).any(dim=1)].contiguous().to(device)
        shape = slots.shape[0], kernels.hidden
        rows = torch.randn(shape, generator=generator, dtype=f32).to(device, kernels.dtype)
        weights = torch.full(slots.shape, 1 / top_k, device=device, dtype=f32)
        out = torch.empty(shape, device=device, dtype=f32)
        times: list[float] = []
        while len(times) < 2 or (len(times) < REPEATS and sum(times) < LONG_S) or sum(times) < LEAST_S:
            started = perf_counter()
            if pause is None:
                kernels(rows, slots, weights, out, workspace)
            else:
                for _ in kernels.in_slices(rows, slots, weights, out, workspace):
                    started += pause()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            times.append(perf_counter() - started)
        timings.append((n_rows, min(times)))
    return timings
