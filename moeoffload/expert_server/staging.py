"""Between frames in host memory and kernels on a GPU."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from moeoffload.expert_server.arena import DECODE_ROWS, KernelInput
from moeoffload.expert_server.device_queue import Queues
from moeoffload.payload import first_bad_row
from moeoffload.wire import DispatchViews, FrameLayout

_ALIGNMENT: Final = 16


class _Staged(NamedTuple):
    """Views for one number of rows: page-locked and device memory with a dispatch body, and its reply."""

    host_body: torch.Tensor
    """All bytes of ``host``."""
    host: DispatchViews
    device_body: torch.Tensor
    device: DispatchViews
    call: KernelInput
    host_reply: torch.Tensor
    device_reply: torch.Tensor


class _Lane:
    """The buffers of one call on its way through the device."""

    def __init__(
        self, max_rows: int, layout: FrameLayout, compute_dtype: torch.dtype, device: torch.device, queues: Queues
    ) -> None:
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
        self._kept: dict[tuple[int, torch.dtype], _Staged] = {}
        self.arrived, self.computed, self.replied = (queues.point(device) for _ in range(3))
        self.holds: tuple[int, int] | None = None
        """Request id and rows of the request that was brought here and is not computed yet."""
        self.slot_range = (0, -1)
        """Its least and greatest slot."""
        self.is_used = False
        """A kernel may be at work on it."""
        self.n_created = 1

    def views(self, n_rows: int, weights_dtype: torch.dtype) -> _Staged:
        """Views for a number of rows; kept for decode-shaped calls."""
        staged = self._kept.get((n_rows, weights_dtype))
        if staged is not None:
            return staged
        (host_body, host), (device_body, device) = self._body(self._host, n_rows), self._body(self._device, n_rows)
        out = self._out[:n_rows]
        call = KernelInput(
            device.rows if device.rows.dtype == self._compute_dtype else self._rows[:n_rows],
            self._slots[:n_rows],
            device.weights if weights_dtype == torch.float32 else self._weights[:n_rows],
            out,
        )
        replies = (self._host_reply[:n_rows], self._device_reply[:n_rows])
        device_reply = out if replies[1].dtype == out.dtype else replies[1]
        staged = _Staged(host_body, host, device_body, device, call, replies[0], device_reply)
        if n_rows <= DECODE_ROWS:
            self._kept[n_rows, weights_dtype] = staged
            self.n_created += 1
        return staged

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


class DeviceArena:
    """The arena of kernels that run on a GPU: frames go to the device and back by copies that it does by itself.

    Copies have queues of their own beside that of the kernels. While one call is computed the next one's rows can come
    (`stage`); the host waits once a call, for the reply alone. Many rows are copied out of the frame itself if that is
    page-locked, else by way of memory that is. Slots always are copied to memory of ours and checked there: the
    peer can still write to the frame, and a slot is an address.

    Checked with queues that run late and in any order the waits allow; not run on a GPU.
    """

    def __init__(
        self,
        max_rows: int,
        layout: FrameLayout,
        compute_dtype: torch.dtype,
        device: torch.device,
        *,
        queues: Queues | None = None,
    ) -> None:
        self._queues = queues or Queues(device)
        n_lanes = 1 if max_rows <= DECODE_ROWS else 2  # a decode step waits for the one before
        self._lanes = [_Lane(max_rows, layout, compute_dtype, device, self._queues) for _ in range(n_lanes)]
        self._current = self._lanes[0]
        self._staged: _Staged | None = None
        self.frames_are_locked = False
        """Frames are page-locked."""

    @property
    def n_created(self) -> int:
        """See `Arena`."""
        return sum(lane.n_created for lane in self._lanes)

    def stage(self, views: DispatchViews, n_rows: int, weights_dtype: torch.dtype, request_id: int) -> None:
        """Begins to bring the request that is computed after the current one; nothing if no lane is free.

        Its frame stays as it is until it was answered.
        """
        for lane in self._lanes:
            if lane is not self._current and lane.holds is None:
                self._bring(lane, views, n_rows, weights_dtype, request_id)

    def fill(
        self, views: DispatchViews, n_rows: int, weights_dtype: torch.dtype, n_experts: int, request_id: int = 0
    ) -> KernelInput:
        """See `Arena`."""
        lane = next((each for each in self._lanes if each.holds == (request_id, n_rows)), None)
        if lane is None:
            lane = self._current
            self._bring(lane, views, n_rows, weights_dtype, request_id)
        for other in self._lanes:
            other.holds = None  # what was brought and is not computed now never will be: its request was refused
        self._current = lane
        least, greatest = lane.slot_range
        if least < -1 or greatest >= n_experts:
            raise IndexError(f"a slot is {least} or {greatest}, allowed are -1 to {n_experts - 1}")
        staged = self._staged = lane.views(n_rows, weights_dtype)
        compute = self._queues.compute
        compute.follow(lane.arrived)
        lane.is_used = True
        call, arrived = staged.call, staged.device
        compute.copy(call.slots, arrived.slots)
        if call.weights is not arrived.weights:
            compute.copy(call.weights, arrived.weights)
        if call.rows is not arrived.rows:
            compute.copy(call.rows, arrived.rows)
        return call

    def finish(self, call: KernelInput, reply: torch.Tensor) -> int | None:
        """See `Arena`; waits for the device."""
        staged, lane, queues = self._staged, self._current, self._queues
        assert staged is not None
        assert call is staged.call, "calls are finished before the next one is filled in"
        if staged.device_reply is not call.out:
            queues.compute.copy(staged.device_reply, call.out)
        queues.compute.mark(lane.computed)
        queues.outbound.follow(lane.computed)
        target = reply if self.frames_are_locked else staged.host_reply
        queues.outbound.copy(target, staged.device_reply)
        queues.outbound.mark(lane.replied)
        lane.replied.wait()
        lane.is_used = False
        if target is not reply:
            reply.copy_(target)
        return first_bad_row(reply)

    def settle(self) -> None:
        """Waits for all that is under way, so that frames can be given back."""
        for lane in self._lanes:
            lane.arrived.wait()
            lane.replied.wait()

    def _bring(
        self, lane: _Lane, views: DispatchViews, n_rows: int, weights_dtype: torch.dtype, request_id: int
    ) -> None:
        """Queues the copies of a frame into a lane's memory on the device."""
        inbound = self._queues.inbound
        staged = lane.views(n_rows, weights_dtype)
        lane.arrived.wait()  # what was copied from this lane's memory before is out of it
        if lane.is_used:  # its call has failed on the way, and nobody has waited for the kernels
            self._queues.compute.mark(lane.computed)
            inbound.follow(lane.computed)
            lane.is_used = False
        staged.host.slots.copy_(views.slots)
        least, greatest = staged.host.slots.aminmax()
        lane.slot_range = int(least), int(greatest)
        if self.frames_are_locked and n_rows > DECODE_ROWS:
            inbound.copy(staged.device.slots, staged.host.slots)
            inbound.copy(staged.device.rows, views.rows)
            inbound.copy(staged.device.weights, views.weights)
        else:  # one copy of few bytes takes less than three
            staged.host.rows.copy_(views.rows)
            staged.host.weights.copy_(views.weights)
            inbound.copy(staged.device_body, staged.host_body)
        inbound.mark(lane.arrived)
        lane.holds = request_id, n_rows


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _matrix(buffer: torch.Tensor, at: int, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    return buffer[at : at + rows * columns * dtype.itemsize].view(dtype).view(rows, columns)
