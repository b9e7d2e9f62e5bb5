"""An expert server that takes longer than its machine needs, for benchmarks of servers that differ.

``python bench/slow_server.py factor=4 -- OPTIONS OF moeoffload-expert``; ``above=64 above_factor=8`` makes only calls
of more than 64 rows slow. In a process of one's own: `slow_down`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from time import perf_counter
from typing import Final

import torch

from moeoffload.cli import expert_app
from moeoffload.kernels import KernelInput, KernelWorkspace, LayerKernels

SLICE_S: Final = 1e-3
"""A call in slices waits in such pieces, so that others have their turn meanwhile."""


def slow_down(factor: float = 1.0, above: int = 1 << 30, above_factor: float = 1.0) -> None:
    """Makes every call of this process's `LayerKernels` take ``factor`` times as long, for good.

    Those of more than ``above`` rows take ``above_factor`` times as long again. A call takes a multiple of what its
    routes took at best so far; what it took itself does not matter: when another process read memory at the same time
    that is not to be multiplied.
    """
    best_s: dict[int, float] = {}  # seconds per route, by the number of bits of the number of rows
    in_a_slice = threading.local()  # some kernels make a slice of a whole call: that must not be slowed twice
    whole, slices = LayerKernels.__call__, LayerKernels.in_slices

    def missing_s(slots: torch.Tensor, took_s: float) -> float:
        n_rows, n_routes = slots.shape[0], int((slots >= 0).sum())
        wanted = factor * (above_factor if n_rows > above else 1.0)
        if wanted <= 1.0 or not n_routes:
            return 0.0
        size = n_rows.bit_length()
        best = best_s[size] = min(best_s.get(size, took_s), took_s / n_routes)
        return max(0.0, wanted * best * n_routes - took_s)

    def slow_call(self: LayerKernels, call: KernelInput, workspace: KernelWorkspace | None = None) -> None:
        started = perf_counter()
        whole(self, call, workspace)
        if not getattr(in_a_slice, "now", False):
            time.sleep(missing_s(call.slots, perf_counter() - started))

    def slow_slices(self: LayerKernels, call: KernelInput, workspace: KernelWorkspace | None = None) -> Iterator[None]:
        took_s, parts = 0.0, slices(self, call, workspace)
        while True:
            started, in_a_slice.now = perf_counter(), True
            try:
                next(parts)
            except StopIteration:
                break
            finally:
                in_a_slice.now = False
                took_s += perf_counter() - started
            yield
        left_s = missing_s(call.slots, took_s)
        while left_s > 0:
            time.sleep(min(left_s, SLICE_S))
            left_s -= SLICE_S
            yield

    LayerKernels.__call__ = slow_call  # type: ignore[method-assign]
    LayerKernels.in_slices = slow_slices  # type: ignore[method-assign]


def main() -> None:
    """Slows this process down as the arguments before ``--`` say, then serves with those behind it."""
    at = sys.argv.index("--")
    how = dict(argument.split("=") for argument in sys.argv[1:at])
    slow_down(float(how.pop("factor", 1)), int(how.pop("above", 1 << 30)), float(how.pop("above_factor", 1)))
    if how:
        raise SystemExit(f"{', '.join(how)} is not known; allowed are factor, above and above_factor")
    sys.argv = ["moeoffload-expert", *sys.argv[at + 1 :]]
    expert_app.main()


if __name__ == "__main__":
    main()
