"""Buffers between received frames and kernels, on the CPU and on a GPU: slots as int64, rows in the compute dtype."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from moeoffload.errors import ServerError
from moeoffload.kernels import KernelInput, SlotError
from moeoffload.page_locked import PageLocked
from moeoffload.payload import first_bad_row, load_rows, store_rows
from moeoffload.transport.base import ServerSlot
from moeoffload.wire import HEADER_BYTES, DispatchViews, FrameLayout

logger = logging.getLogger(__name__)

DECODE_ROWS: Final = 8
"""Calls of at most this many rows are decode- or verify-shaped."""
_MOST_KEPT: Final = 256
"""Most views of a `HostArena` that are cached."""
RunWork = Callable[[Callable[[], None]], None]


class HostArena:
    """One host's buffers for calls of any size up to the capacity of its frames, of kernels that run on the CPU."""

    def __init__(self, layout: FrameLayout, compute_dtype: torch.dtype) -> None:
        max_rows = layout.capacity
        # Rows that arrive in the compute dtype are used in place in the frame, unless the call has several members.
        self.copies_rows = layout.dtype_out.torch_dtype != compute_dtype
        rows = torch.empty(max_rows, layout.hidden, dtype=compute_dtype)
        slots = torch.empty(max_rows, layout.top_k, dtype=torch.int64)
        out = torch.empty(max_rows, layout.hidden, dtype=torch.float32)
        weights = {dtype: torch.empty(max_rows, layout.top_k, dtype=dtype) for dtype in {torch.float32, compute_dtype}}

        @lru_cache(_MOST_KEPT)
        def part(start: int, n_rows: int, weights_dtype: torch.dtype) -> KernelInput:
            return KernelInput(*(each[start : start + n_rows] for each in (rows, slots, weights[weights_dtype], out)))

        self.part: Callable[[int, int, torch.dtype], KernelInput] = part
        """Returns views of the buffers for a number of rows from a start on."""
        self._info = part.cache_info

    @property
    def n_created(self) -> int:
        """Number of buffers and views made so far."""
        return 1 + self._info().misses

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


class _Staged(NamedTuple):
    """Views for one number of rows: the dispatch body in page-locked and in device memory, and the reply in both."""

    host_body: torch.Tensor
    """All bytes of ``host``."""
    host: DispatchViews
    device_body: torch.Tensor
    device: DispatchViews
    call: KernelInput
    host_reply: torch.Tensor
    device_reply: torch.Tensor


class DeviceArena:
    """As `HostArena`, for a GPU's kernels: its operations run in order, and the CPU waits once, for the reply.

    Large calls are copied straight from the frame if it is page-locked, others through a page-locked buffer. Slots are
    always copied to the server's own memory and checked there: the peer can still write to the frame, and a slot is
    used as an index into device memory.
    """

    def __init__(self, layout: FrameLayout, compute_dtype: torch.dtype, device: torch.device) -> None:
        max_rows = layout.capacity
        self._layout = layout
        self._compute_dtype = compute_dtype
        self._device = device
        self.frames_are_locked = False
        """Whether frames are page-locked."""
        self._lock = threading.Lock()
        self._pages: PageLocked | None = None
        self._closed = False
        n_bytes = layout.request_bytes
        hidden, is_gpu = layout.hidden, device.type == "cuda"
        self._host_bytes = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self._device_bytes = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        self._rows = torch.empty(max_rows, hidden, dtype=compute_dtype, device=device)
        self._slots = torch.empty(max_rows, layout.top_k, dtype=torch.int64, device=device)
        self._weights = torch.empty(max_rows, layout.top_k, dtype=compute_dtype, device=device)
        self._out = torch.empty(max_rows, hidden, dtype=torch.float32, device=device)
        back = layout.dtype_back.torch_dtype
        columns = layout.dtype_back.columns(hidden)
        self._host_reply = torch.empty(max_rows, columns, dtype=back, pin_memory=is_gpu)
        self._device_reply = torch.empty(max_rows, columns, dtype=back, device=device)
        self._kept: dict[tuple[int, torch.dtype], _Staged] = {}
        self._staged: _Staged | None = None
        self.n_created = 1
        self._is_busy = False
        """Whether queued operations have not been waited for yet."""

    def fill(self, views: DispatchViews, n_rows: int, weights_dtype: torch.dtype, n_experts: int) -> KernelInput:
        """See `HostArena.fill`. Raises SlotError: a slot is outside -1 to n_experts - 1."""
        if self._is_busy:
            self.settle()  # the last call failed before `finish`: its copies may still read the buffers
        staged = self._staged = self._views(n_rows, weights_dtype)
        host, device, call = staged.host, staged.device, staged.call
        host.slots.copy_(views.slots)
        if host.slots.min() < -1 or host.slots.max() >= n_experts:
            raise SlotError(n_experts)
        self._is_busy = True
        if self.frames_are_locked and n_rows > DECODE_ROWS:
            device.slots.copy_(host.slots, non_blocking=True)
            device.rows.copy_(views.rows, non_blocking=True)
            device.weights.copy_(views.weights, non_blocking=True)
        else:  # for few bytes one copy is faster than three
            host.rows.copy_(views.rows)
            host.weights.copy_(views.weights)
            staged.device_body.copy_(staged.host_body, non_blocking=True)
        call.slots.copy_(device.slots)
        if call.weights is not device.weights:
            call.weights.copy_(device.weights)
        if call.rows is not device.rows:
            load_rows(device.rows, call.rows)
        return call

    def finish(self, call: KernelInput, reply: torch.Tensor) -> int | None:
        """See `HostArena.finish`; waits for the device."""
        staged = self._staged
        assert staged is not None
        assert call is staged.call, "calls are finished before the next one is filled in"
        bad = None
        if staged.device_reply.dtype is torch.uint8:
            bad = store_rows(call.out, staged.device_reply)
        elif staged.device_reply is not call.out:
            staged.device_reply.copy_(call.out)
        target = reply if self.frames_are_locked else staged.host_reply
        target.copy_(staged.device_reply, non_blocking=True)
        self.settle()
        if target is not reply:
            reply.copy_(target)
        return bad if reply.dtype is torch.uint8 else first_bad_row(reply)

    def lock_frames(self, slots: Iterable[ServerSlot]) -> None:
        """Page-locks the slots' buffers so that a GPU copies from and to them directly; before the first request."""
        if self._device.type != "cuda":
            return
        with self._lock:
            if not self._closed and self._pages is None:
                buffers = (buffer for slot in slots for buffer in (slot.request, slot.reply))
                self._pages = PageLocked(buffers, self._device)
                self.settle()
                self.frames_are_locked = self._pages.is_locked

    def close(self, run: RunWork) -> None:
        """See `HostArena.close`."""
        with self._lock:
            self._closed = True
        if self._pages is None:
            return
        try:
            run(self._unlock_frames)
        except (ServerError, RuntimeError) as error:  # the device is still at work, or may have failed for good
            logger.warning("buffers of a lease are kept until this server ends: %s", error)
            self._pages.abandon()

    def _unlock_frames(self) -> None:
        assert self._pages is not None
        self.settle()
        self.frames_are_locked = False
        self._pages.close()

    def settle(self) -> None:
        """Waits for all queued operations, so that frames can be released."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._is_busy = False

    def _views(self, n_rows: int, weights_dtype: torch.dtype) -> _Staged:
        """Returns views for a number of rows; cached for decode-shaped calls."""
        staged = self._kept.get((n_rows, weights_dtype))
        if staged is not None:
            return staged
        body = slice(HEADER_BYTES, HEADER_BYTES + n_rows * self._layout.dispatch_row_bytes)
        host = self._layout.dispatch_views(self._host_bytes, n_rows)
        device = self._layout.dispatch_views(self._device_bytes, n_rows)
        out = self._out[:n_rows]
        call = KernelInput(
            device.rows if device.rows.dtype == self._compute_dtype else self._rows[:n_rows],
            self._slots[:n_rows],
            device.weights if weights_dtype == torch.float32 else self._weights[:n_rows],
            out,
        )
        device_reply = out if self._device_reply.dtype == out.dtype else self._device_reply[:n_rows]
        ends = self._host_bytes[body], host, self._device_bytes[body], device
        staged = _Staged(*ends, call, self._host_reply[:n_rows], device_reply)
        if n_rows <= DECODE_ROWS:
            self._kept[n_rows, weights_dtype] = staged
            self.n_created += 1
        return staged
