"""Between frames in host memory and kernels on a GPU."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from moeoffload.expert_server.arena import DECODE_ROWS, KernelInput
from moeoffload.expert_server.fence import Fence
from moeoffload.payload import first_bad_row
from moeoffload.wire import DispatchViews, FrameLayout

_ALIGNMENT: Final = 16


class _Staged(NamedTuple):
    """Views for one number of rows: page-locked and device memory with a dispatch body, and its reply."""

    host: torch.Tensor
    """All bytes of ``host_views``."""
    host_views: DispatchViews
    device: torch.Tensor
    device_views: DispatchViews
    call: KernelInput
    host_reply: torch.Tensor
    device_reply: torch.Tensor


class DeviceArena:
    """The arena of kernels that run on a GPU: frames pass through page-locked memory, which the GPU copies by itself.

    Everything is queued on the device's current stream, whose order is all the order there is; the engine has one call
    at a time, so a stream of their own would leave the copies nothing to overlap with. The host waits once a call, for
    the reply alone. Frames are copied before they are looked at: the peer can still write to shared memory.

    Checked with both sides on the CPU; not run on a GPU.
    """

    def __init__(self, max_rows: int, layout: FrameLayout, compute_dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._compute_dtype = compute_dtype
        n_bytes = self._sections(max_rows)[-1]
        hidden, is_gpu = layout.hidden, device.type == "cuda"
        self._host = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self._device = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        self._rows = torch.empty(max_rows, hidden, dtype=compute_dtype, device=device)
        self._slots = torch.empty(max_rows, layout.top_k, dtype=torch.int64, device=device)
        self._weights = torch.empty(max_rows, layout.top_k, dtype=compute_dtype, device=device)
        self._out = torch.empty(max_rows, hidden, dtype=torch.float32, device=device)
        back = layout.dtype_back.torch_dtype
        self._host_reply = torch.empty(max_rows, hidden, dtype=back, pin_memory=is_gpu)
        self._device_reply = torch.empty(max_rows, hidden, dtype=back, device=device)
        self._sent, self._received = Fence(device), Fence(device)
        self._kept: dict[tuple[int, torch.dtype], _Staged] = {}
        self._staged: _Staged | None = None
        self.n_created = 1

    def fill(self, views: DispatchViews, n_rows: int, weights_dtype: torch.dtype, n_experts: int) -> KernelInput:
        """See `Arena`."""
        staged = self._staged = self._views(n_rows, weights_dtype)
        self._sent.wait()  # a call that failed on its way has not waited for its copy
        for target, source in zip(staged.host_views, views, strict=True):
            target.copy_(source)
        least, greatest = staged.host_views.slots.aminmax()
        if least < -1 or greatest >= n_experts:
            raise IndexError(f"a slot is {int(least)} or {int(greatest)}, allowed are -1 to {n_experts - 1}")
        staged.device.copy_(staged.host, non_blocking=True)
        self._sent.record()
        call, arrived = staged.call, staged.device_views
        call.slots.copy_(arrived.slots)
        if call.weights is not arrived.weights:
            call.weights.copy_(arrived.weights)
        if call.rows is not arrived.rows:
            call.rows.copy_(arrived.rows)
        return call

    def finish(self, call: KernelInput, reply: torch.Tensor) -> int | None:
        """See `Arena`; waits for the device."""
        staged = self._staged
        assert staged is not None
        assert call is staged.call, "calls are finished before the next one is filled in"
        if staged.device_reply is not call.out:
            staged.device_reply.copy_(call.out)
        staged.host_reply.copy_(staged.device_reply, non_blocking=True)
        self._received.record()
        self._received.wait()
        reply.copy_(staged.host_reply)
        return first_bad_row(reply)

    def _sections(self, n_rows: int) -> tuple[int, int, int]:
        """Where weights and slots begin in a dispatch body of ``n_rows`` rows, and its length, in bytes."""
        layout = self._layout
        weights_at = _aligned(n_rows * layout.hidden * layout.dtype_out.itemsize)
        slots_at = weights_at + _aligned(n_rows * layout.top_k * torch.float32.itemsize)
        return weights_at, slots_at, slots_at + _aligned(n_rows * layout.top_k * torch.int16.itemsize)

    def _body(self, buffer: torch.Tensor, n_rows: int) -> tuple[torch.Tensor, DispatchViews]:
        layout = self._layout
        weights_at, slots_at, end = self._sections(n_rows)
        return buffer[:end], DispatchViews(
            _matrix(buffer, 0, layout.dtype_out.torch_dtype, n_rows, layout.hidden),
            _matrix(buffer, weights_at, torch.float32, n_rows, layout.top_k),
            _matrix(buffer, slots_at, torch.int16, n_rows, layout.top_k),
        )

    def _views(self, n_rows: int, weights_dtype: torch.dtype) -> _Staged:
        staged = self._kept.get((n_rows, weights_dtype))
        if staged is not None:
            return staged
        host, device = self._body(self._host, n_rows), self._body(self._device, n_rows)
        out = self._out[:n_rows]
        call = KernelInput(
            device[1].rows if device[1].rows.dtype == self._compute_dtype else self._rows[:n_rows],
            self._slots[:n_rows],
            device[1].weights if weights_dtype == torch.float32 else self._weights[:n_rows],
            out,
        )
        replies = (self._host_reply[:n_rows], self._device_reply[:n_rows])
        staged = _Staged(*host, *device, call, replies[0], out if replies[1].dtype == out.dtype else replies[1])
        if n_rows <= DECODE_ROWS:
            self._kept[n_rows, weights_dtype] = staged
            self.n_created += 1
        return staged


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _matrix(buffer: torch.Tensor, at: int, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    return buffer[at : at + rows * columns * dtype.itemsize].view(dtype).view(rows, columns)
