"""Copies beside the kernels of a GPU: whatever the order in which the device comes to them, answers are right.

There is no GPU here. Its queues are played by ones that run late, one step of a random queue at a time, as the points
they wait for allow.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moeoffload.expert_server.device_queue import Point, Queues
from moeoffload.expert_server.staging import DeviceArena
from moeoffload.payload import PayloadDtype
from moeoffload.transport.page_locked import PageLocked
from moeoffload.wire import FrameLayout

CPU = torch.device("cpu")
N_EXPERTS = 9


class LateDevice:
    """Does what was queued when somebody waits, no sooner than needed and in any order that is allowed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.queues: list[LateQueue] = []

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            ready = [queue for queue in self.queues if queue.is_ready()]
            assert ready, "everybody waits for somebody"
            self.random.choice(ready).step()


class LatePoint(Point):
    """Counts how often it was set, and how often the device has come to it."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.n_set = self.n_reached = 0

    def wait(self) -> None:
        n_set = self.n_set
        self.device.run_until(lambda: self.n_reached >= n_set)


class LateQueue:
    """Work in order; a point and a number is something to wait for."""

    def __init__(self, device: LateDevice) -> None:
        self.work: deque[Callable[[], Any] | tuple[LatePoint, int]] = deque()
        device.queues.append(self)

    def is_ready(self) -> bool:
        if not self.work:
            return False
        first = self.work[0]
        return not isinstance(first, tuple) or first[0].n_reached >= first[1]

    def step(self) -> None:
        first = self.work.popleft()
        if not isinstance(first, tuple):
            first()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.work.append(lambda: target.copy_(source))

    def mark(self, point: Any) -> None:
        point.n_set += 1

        def reached() -> None:
            point.n_reached += 1

        self.work.append(reached)

    def follow(self, point: Any) -> None:
        self.work.append((point, point.n_set))


def late_queues(device: LateDevice) -> Queues:
    return Queues(CPU, queue=lambda _, own: LateQueue(device), point=lambda _: LatePoint(device))


def a_request(layout: FrameLayout, frame: memoryview, n_rows: int, chance: random.Random) -> Any:
    """Writes a request into a frame; returns its views, and the sums that answer it."""
    views = layout.dispatch_views(frame, n_rows)
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    views.rows.copy_(torch.randint(-8, 8, views.rows.shape, generator=generator))
    views.weights.copy_(torch.rand(views.weights.shape, generator=generator))
    views.slots.copy_(torch.randint(-1, N_EXPERTS, views.slots.shape, generator=generator))
    return views, sums(views.rows, views.slots, views.weights)


def sums(rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What plays the kernel. A slot is an address: a wrong one would end the server, whoever wants the result."""
    assert ((slots >= -1) & (slots < N_EXPERTS)).all()
    return rows.float() * 3 + slots.sum(dim=1, keepdim=True) + weights.float().sum(dim=1, keepdim=True)


@pytest.mark.parametrize("out", [PayloadDtype.F32, PayloadDtype.BF16], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("locked", [False, True], ids=["between", "page-locked"])
@pytest.mark.parametrize("max_rows", [8, 40])
def test_answers_do_not_depend_on_when_the_device_does_what(max_rows: int, locked: bool, out: PayloadDtype) -> None:
    for seed in range(60):
        chance, device = random.Random(seed), LateDevice(seed)
        layout = FrameLayout(hidden=6, top_k=3, dtype_out=out, dtype_back=PayloadDtype.F16, capacity=max_rows)
        queues = late_queues(device)
        arena = DeviceArena(max_rows, layout, torch.float32, CPU, queues=queues)
        arena.frames_are_locked = locked
        frames = [memoryview(bytearray(layout.request_bytes)) for _ in range(3)]
        coming: deque[tuple[int, int, Any, torch.Tensor]] = deque()
        free = deque(range(3))
        for request_id in range(1, 25):
            while free:
                index, n_rows = free.popleft(), chance.choice([1, max_rows // 2, max_rows])
                coming.append((index, request_id * 10 + index, *a_request(layout, frames[index], n_rows, chance)))
            index, number, views, expected = coming.popleft()
            free.append(index)
            n_rows, fate = views.rows.shape[0], chance.random()
            if fate < 0.1:
                continue  # refused before it was computed, though it may have been brought already
            call = arena.fill(views, n_rows, torch.float32, N_EXPERTS, number)
            compute: Any = queues.compute
            compute.work.append(lambda call=call: call.out.copy_(sums(call.rows, call.slots, call.weights)))
            if chance.random() < 0.7:
                following = coming[0]
                arena.stage(following[2], following[2].rows.shape[0], torch.float32, following[1])
            if 0.1 <= fate < 0.2:
                continue  # the kernel has failed, and nobody waits for what it began
            frame = memoryview(bytearray(layout.reply_bytes))
            reply = layout.combine_view(frame, n_rows)
            assert arena.finish(call, reply) is None
            assert torch.equal(reply, expected.half())
        arena.settle()


def test_bad_slots_of_a_request_that_came_ahead_are_refused_when_its_turn_comes() -> None:
    layout = FrameLayout(hidden=6, top_k=3, dtype_out=PayloadDtype.F16, dtype_back=PayloadDtype.F16, capacity=40)
    device = LateDevice(0)
    arena = DeviceArena(40, layout, torch.float32, CPU, queues=late_queues(device))
    frames = [memoryview(bytearray(layout.request_bytes)) for _ in range(2)]
    (good, _), (bad, _) = (a_request(layout, frame, 20, random.Random(3)) for frame in frames)
    bad.slots[4, 1] = N_EXPERTS
    call = arena.fill(good, 20, torch.float32, N_EXPERTS, 1)
    arena.stage(bad, 20, torch.float32, 2)
    arena.finish(call, layout.combine_view(memoryview(bytearray(layout.reply_bytes)), 20))
    bad.slots[4, 1] = 0  # too late: what was checked is what is computed
    with pytest.raises(IndexError, match="allowed are -1 to 8"):
        arena.fill(bad, 20, torch.float32, N_EXPERTS, 2)


def test_a_request_that_came_ahead_and_was_refused_does_not_stay() -> None:
    layout = FrameLayout(hidden=6, top_k=3, dtype_out=PayloadDtype.F16, dtype_back=PayloadDtype.F16, capacity=40)
    arena = DeviceArena(40, layout, torch.float32, CPU, queues=late_queues(LateDevice(0)))
    requests = [
        a_request(layout, memoryview(bytearray(layout.request_bytes)), 20, random.Random(seed)) for seed in range(4)
    ]
    replies = [layout.combine_view(memoryview(bytearray(layout.reply_bytes)), 20) for _ in range(4)]
    call = arena.fill(requests[0][0], 20, torch.float32, N_EXPERTS, 1)
    arena.stage(requests[1][0], 20, torch.float32, 2)
    arena.finish(call, replies[0])
    call = arena.fill(requests[2][0], 20, torch.float32, N_EXPERTS, 3)
    arena.stage(requests[3][0], 20, torch.float32, 4)
    before = requests[3][0].rows.clone()
    requests[3][0].rows.zero_()
    arena.finish(call, replies[2])
    call = arena.fill(requests[3][0], 20, torch.float32, N_EXPERTS, 4)
    arena.finish(call, replies[3])
    assert torch.equal(call.rows, before.float())


class Runtime:
    """Notes what CUDA would be asked to lock; fails at a given call."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.ranges: dict[int, int] = {}
        self.n_calls = 0
        self.fails_at = fails_at

    def cudaHostRegister(self, start: int, n_bytes: int, flags: int) -> int:
        self.n_calls += 1
        if self.n_calls == self.fails_at:
            return 2
        assert flags == 0
        assert all(start + n_bytes <= other or start >= other + size for other, size in self.ranges.items())
        self.ranges[start] = n_bytes
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        return 0 if self.ranges.pop(start, None) is not None else 1


def test_whole_pages_are_locked_once_and_given_back() -> None:
    memory = memoryview(mmap.mmap(-1, 8 * mmap.PAGESIZE))
    page = mmap.PAGESIZE
    buffers = [memory[:100], memory[100:300], memory[3 * page : 5 * page], memory[6 * page : 6 * page + 1], memory[:0]]
    runtime = Runtime()
    locked = PageLocked(buffers, CPU, runtime)
    assert locked.is_locked
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert runtime.ranges == {start: page, start + 3 * page: 2 * page, start + 6 * page: page}
    locked.close()
    locked.close()
    assert runtime.ranges == {}
    assert not locked.is_locked


def test_memory_that_cannot_be_locked_is_used_as_it_is() -> None:
    memory = memoryview(mmap.mmap(-1, 8 * mmap.PAGESIZE))
    runtime = Runtime(fails_at=2)
    locked = PageLocked([memory[:10], memory[5 * mmap.PAGESIZE :]], CPU, runtime)
    assert not locked.is_locked
    assert runtime.ranges == {}
    locked.close()
