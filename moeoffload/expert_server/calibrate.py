"""Times calls of a few sizes of a layer's experts on this server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

import torch

from moeoffload.kernels import KernelInput, KernelWorkspace, LayerKernels

# The host learns the time of larger calls in use: timing them here would touch their workspaces and slow every load.
SIZES: Final = (1, 4, 16, 64, 256)
REPEATS: Final = 10
LEAST_S: Final = 0.02
"""A size is repeated for at least this long, even if its calls take microseconds: longer than a busy machine keeps a
thread off its core, or another thread disturbs it."""
LONG_S: Final = 0.25
"""After two calls a size is not timed for longer than this, so that loading stays short."""

LARGER: Final = (2048, 4096)
"""Rows of the calls above the usual batch capacity that are tried on a GPU."""
GAIN: Final = 1.05
"""A larger call must be faster per row by this factor, since it takes more memory and makes others wait longer."""


def best_rows(seconds: Callable[[int], float], usual: int, most: int) -> int:
    """Returns the batch capacity of a GPU, at most ``most`` rows: ``usual``, or the largest size up to which each step
    pays (see `GAIN`).

    ``seconds(rows)`` times a call of that many rows; the search ends at a size that runs out of memory.
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
    workspace: KernelWorkspace | None = None,
    pause: Callable[[], float] | None = None,
    sizes: Sequence[int] = SIZES,
) -> list[tuple[int, float]]:
    """Returns (rows, seconds) of calls of several ``sizes``, each of at most ``capacity`` rows.

    Each row is routed to ``top_k`` different ones of the layer's ``n_experts``; as in a run, only those held here are
    computed, and rows without any are left out. The fastest repeat of a size counts, so that disturbances do not. Runs
    on the thread that owns ``workspace`` (None: the layer's own); between slices it calls ``pause``, if given, which
    lets others compute and returns for how many seconds they did.
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
        call = KernelInput(rows, slots, weights, torch.empty(shape, device=device, dtype=f32))
        times: list[float] = []
        while len(times) < 2 or (len(times) < REPEATS and sum(times) < LONG_S) or sum(times) < LEAST_S:
            started = perf_counter()
            if pause is None:
                kernels(call, workspace)
            else:
                for _ in kernels.in_slices(call, workspace):
                    started += pause()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            times.append(perf_counter() - started)
        timings.append((n_rows, min(times)))
    return timings
