"""Times what a layer's experts take on this server, for calls of a few sizes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import torch

from moeoffload.errors import SettingError
from moeoffload.kernels import KernelWorkspace, LayerKernels

# Larger calls are learned when they come: timing them here would touch their workspaces and lengthen every load.
SIZES: Final = (1, 4, 16, 64, 256)
LEAST_REPEATS: Final = 5
MOST_REPEATS: Final = 40
STABLE: Final = 3
SPREAD: Final = 0.05
"""A time is known when the best `STABLE` of all repeats differ by no more than this: then noise is not what is seen."""
LONG_S: Final = 0.25
"""A size is not timed for longer than this, if it was called twice: loading should stay short."""
SLICE_S: Final = 1e-3
"""How long other hosts' small requests wait for a slice of a long call, about."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """Slows a server down, for benchmarks of slow ones: all calls, and more those of more than ``above_rows`` rows."""

    factor: float = 1.0
    above_rows: int = 1 << 30
    above_factor: float = 1.0
    nominal_s: dict[int, float] = field(default_factory=dict)
    """Least seconds per route seen so far, by the number of bits of the number of rows."""

    @classmethod
    def parse(cls, text: str) -> Pace:
        """Reads ``factor=4`` or ``above=64:8`` or both with a comma between.

        Raises:
            SettingError: the text is neither.
        """
        try:
            values = dict(part.split("=") for part in text.split(","))
            rows, _, above = values.pop("above", "").partition(":")
            pace = cls(float(values.pop("factor", 1)), int(rows or 1 << 30), float(above or 1))
        except ValueError:
            values = {"?": text}
        if values:
            raise SettingError(f"--simulate: {text!r} is not allowed; allowed is factor=F, above=ROWS:F or both")
        return pace

    @property
    def slows(self) -> bool:
        """Whether there is anything to `hold`."""
        return max(self.factor, self.above_factor) > 1.0

    def hold(self, slots: torch.Tensor, started: float) -> None:
        """Sleeps at the end of a call with these ``slots`` (n, top_k) that began at ``started`` (perf_counter)."""
        if (missing_s := self.missing_s(slots, perf_counter() - started)) > 0:
            time.sleep(missing_s)

    def missing_s(self, slots: torch.Tensor, took_s: float) -> float:
        """How much longer than ``took_s`` a call with these ``slots`` (n, top_k) is to take, in seconds.

        The call takes a multiple of what its routes took at best so far. What it took itself does not matter: when
        another process read memory at the same time that is not to be multiplied.
        """
        n_rows = slots.shape[0]
        factor = self.factor * (self.above_factor if n_rows > self.above_rows else 1.0)
        n_routes = int((slots >= 0).sum())
        if factor <= 1.0 or not n_routes:
            return 0.0
        size = n_rows.bit_length()
        best = self.nominal_s[size] = min(self.nominal_s.get(size, took_s), took_s / n_routes)
        return max(0.0, factor * best * n_routes - took_s)


def time_layer(
    kernels: LayerKernels,
    top_k: int,
    capacity: int,
    *,
    n_experts: int,
    device: torch.device,
    workspace: KernelWorkspace,
    pace: Pace,
    pause: Callable[[], float] | None = None,
) -> list[tuple[int, float]]:
    """Rows and seconds of calls of several sizes up to ``capacity`` rows.

    Each row has ``top_k`` different ones of the layer's ``n_experts``; as in a run, only those held here are computed,
    and rows without any are left out. Each size is repeated until its best times agree (`SPREAD`), and the best counts:
    what the call takes, not what disturbed it. One that does not become stable is logged with its spread. Runs on the
    thread that owns ``workspace``; calls ``pause``, if there is one, where others may compute meanwhile: it returns for
    how many seconds they did.
    """
    generator = torch.Generator().manual_seed(0)
    f32 = torch.float32  # always named: while another host's model is opened, torch's default dtype is that model's
    timings = []
    for n_rows in sorted({min(size, capacity) for size in SIZES}):
        order = torch.rand(n_rows, n_experts, generator=generator, dtype=f32).argsort(dim=1)[:, :top_k]
        order[order >= kernels.n_experts] = -1
        order[0, 0] = order[0, 0].clamp(min=0)
        slots = order[(order >= 0).any(dim=1)].contiguous().to(device)
        shape = slots.shape[0], kernels.hidden
        rows = torch.randn(shape, generator=generator, dtype=f32).to(device, kernels.dtype)
        weights = torch.full(slots.shape, 1 / top_k, device=device, dtype=f32)
        out = torch.empty(shape, device=device, dtype=f32)
        times: list[float] = []
        while not _is_known(times):
            started = perf_counter()
            if pause is None:
                kernels(rows, slots, weights, out, workspace)
            else:
                for _ in kernels.in_slices(rows, slots, weights, out, workspace):
                    started += pause()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            pace.hold(slots, started)
            times.append(perf_counter() - started)
        if (spread := spread_of(times)) > SPREAD:
            logger.info("timing %d rows: the best of %d calls differ by %.0f %%", n_rows, len(times), 100 * spread)
        timings.append((n_rows, min(times)))
    return timings


def spread_of(times: Sequence[float]) -> float:
    """By what part of the best the best `STABLE` of these ``times`` (seconds) differ; 0 for one alone."""
    best = sorted(times)[:STABLE]
    return best[-1] / best[0] - 1.0


def _is_known(times: Sequence[float]) -> bool:
    if len(times) >= LEAST_REPEATS and spread_of(times) <= SPREAD:
        return True
    return len(times) >= MOST_REPEATS or (len(times) >= 2 and sum(times) > LONG_S)
