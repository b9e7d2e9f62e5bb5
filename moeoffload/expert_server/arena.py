"""Buffers between a received frame and a kernel: they hold slots as int64 and rows in the compute dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch

from moeoffload.kernels import KernelInput
from moeoffload.payload import load_rows, store_rows
from moeoffload.transport.base import ServerSlot
from moeoffload.wire import DispatchViews, FrameLayout

DECODE_ROWS: Final = 8
"""Calls of at most this many rows are decode- or verify-shaped."""
_KEPT_END: Final = 64
_MOST_KEPT: Final = 256
"""At most ``_MOST_KEPT`` views are cached, only those that end at or before row ``_KEPT_END``."""
RunWork = Callable[[Callable[[], None]], None]


class HostArena:
    """One host's buffers for calls of any size up to the capacity of its frames, of kernels that run on the CPU.

    ``n_created`` counts buffers and cached views made so far.
    """

    def __init__(self, layout: FrameLayout, compute_dtype: torch.dtype) -> None:
        max_rows = layout.capacity
        # Rows that arrive in the compute dtype are used in place in the frame, unless the call has several members.
        self.copies_rows = layout.dtype_out.torch_dtype != compute_dtype
        self._rows = torch.empty(max_rows, layout.hidden, dtype=compute_dtype)
        self._slots = torch.empty(max_rows, layout.top_k, dtype=torch.int64)
        self._out = torch.empty(max_rows, layout.hidden, dtype=torch.float32)
        self._weights = {
            dtype: torch.empty(max_rows, layout.top_k, dtype=dtype) for dtype in {torch.float32, compute_dtype}
        }
        self._kept: dict[tuple[int, int, torch.dtype], KernelInput] = {}
        self.n_created = 1

    def part(self, start: int, n_rows: int, weights_dtype: torch.dtype) -> KernelInput:
        """Returns views of the buffers for ``n_rows`` rows from ``start`` on."""
        key = (start, n_rows, weights_dtype)
        part = self._kept.get(key)
        if part is None:
            rows = slice(start, start + n_rows)
            part = KernelInput(self._rows[rows], self._slots[rows], self._weights[weights_dtype][rows], self._out[rows])
            if start + n_rows <= _KEPT_END and len(self._kept) < _MOST_KEPT:
                self._kept[key] = part
                self.n_created += 1
        return part

    def fill(self, views: DispatchViews, n_rows: int, weights_dtype: torch.dtype, n_experts: int) -> KernelInput:
        """Converts a received dispatch to the form that kernels take.

        ``views`` are over the frame; ``weights_dtype`` is float32 or the compute dtype. Views of buffers are cached by
        row count for decode-shaped calls. The kernels check the slots, so ``n_experts`` is not used.
        """
        del n_experts
        return self.gather(views, 0, n_rows, weights_dtype, in_place=not self.copies_rows)

    def gather(
        self, views: DispatchViews, start: int, n_rows: int, weights_dtype: torch.dtype, *, in_place: bool = False
    ) -> KernelInput:
        """As `fill`, for one of several requests of a call; its rows are placed from ``start`` on, or stay in the frame
        if ``in_place``.

        ``views`` may be over a frame of another host, with another payload dtype.
        """
        part = self.part(start, n_rows, weights_dtype)
        # The kernels check slots, so they must not change after the check: a host could still write to shared memory.
        part.slots.copy_(views.slots)
        part.weights.copy_(views.weights)
        if in_place:
            return KernelInput(views.rows, *part[1:])
        load_rows(views.rows, part.rows)
        return part

    def finish(self, call: KernelInput, reply: torch.Tensor) -> int | None:
        """Writes the result of a call into ``reply`` (n, columns) of the payload dtype, in the frame.

        Returns the first row that is not finite there, or None. Uses no buffers of its own, so ``call`` may belong to
        another host's arena.
        """
        return store_rows(call.out, reply)

    def lock_frames(self, slots: Iterable[ServerSlot]) -> None:
        """Prepares the slots' buffers for calls, before the first request: nothing to do on a CPU."""

    def close(self, run: RunWork) -> None:
        """Frees what `lock_frames` took, for good; ``run`` executes work while no thread computes, or raises
        ServerError."""
