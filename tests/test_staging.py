"""What lies between frames and the kernels of a GPU, with both sides on the CPU: bytes, dtypes, refusals."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import DEMO, StartServer

from moeoffload import open_model
from moeoffload.errors import ServerError
from moeoffload.expert_server.arena import DeviceArena, HostArena
from moeoffload.page_locked import PageLocked
from moeoffload.payload import PayloadDtype, store_rows
from moeoffload.wire import FrameLayout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
N_EXPERTS = 9


def a_frame(layout: FrameLayout, n_rows: int, seed: int = 0) -> Any:
    views = layout.dispatch_views(memoryview(bytearray(layout.request_bytes)), n_rows)
    generator = torch.Generator().manual_seed(seed)
    store_rows(torch.randn(n_rows, layout.hidden, generator=generator), views.rows)
    views.weights.copy_(torch.rand(views.weights.shape, generator=generator))
    views.slots.copy_(torch.randint(-1, N_EXPERTS, views.slots.shape, generator=generator))
    return views


@pytest.mark.parametrize("back", list(PayloadDtype), ids=lambda dtype: f"back-{dtype.label}")
@pytest.mark.parametrize("out", list(PayloadDtype), ids=lambda dtype: f"out-{dtype.label}")
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("locked", [False, True], ids=["", "locked"])
def test_kernels_get_and_hosts_receive_the_same_as_on_a_cpu(
    out: PayloadDtype, back: PayloadDtype, compute: torch.dtype, locked: bool
) -> None:
    layout = FrameLayout(hidden=6, top_k=3, dtype_out=out, dtype_back=back, capacity=33)
    staging, plain = DeviceArena(layout, compute, DEVICE), HostArena(layout, compute)
    staging.frames_are_locked = locked
    for n_rows in (1, 5, 33, 7, 1):
        for weights_dtype in (torch.float32, compute):
            views = a_frame(layout, n_rows, seed=n_rows)
            call = staging.fill(views, n_rows, weights_dtype, N_EXPERTS)
            expected = plain.fill(views, n_rows, weights_dtype, N_EXPERTS)
            for got, want in zip(call[:3], expected[:3], strict=True):
                assert got.dtype == want.dtype
                assert torch.equal(got.cpu(), want)
            for arena, its_call in ((staging, call), (plain, expected)):
                its_call.out.copy_(its_call.rows.float() * 3 + its_call.slots.sum(dim=1, keepdim=True))
                frame = memoryview(bytearray(layout.reply_bytes))
                arena.finish(its_call, layout.combine_view(frame, n_rows))
                if arena is staging:
                    staged = layout.combine_view(frame, n_rows)
            assert torch.equal(staged, layout.combine_view(frame, n_rows))


@pytest.mark.parametrize("slot", [N_EXPERTS, -2, 32_767])
def test_slots_that_do_not_exist_are_refused_before_anything_reaches_the_device(slot: int) -> None:
    layout = FrameLayout(hidden=6, top_k=3, dtype_out=PayloadDtype.F16, dtype_back=PayloadDtype.F16, capacity=8)
    staging = DeviceArena(layout, torch.float32, DEVICE)
    good, bad = a_frame(layout, 4, seed=1), a_frame(layout, 4, seed=2)
    bad.slots[2, 1] = slot
    staging.fill(good, 4, torch.float32, N_EXPERTS)
    with pytest.raises(IndexError):
        staging.fill(bad, 4, torch.float32, N_EXPERTS)
    call = staging.fill(good, 4, torch.float32, N_EXPERTS)
    assert torch.equal(call.slots.cpu(), good.slots.long())


def test_a_peer_that_changes_its_frame_afterwards_changes_nothing() -> None:
    layout = FrameLayout(hidden=6, top_k=3, dtype_out=PayloadDtype.F32, dtype_back=PayloadDtype.F32, capacity=8)
    views = a_frame(layout, 4)
    before = [view.clone() for view in views]
    call = DeviceArena(layout, torch.float32, DEVICE).fill(views, 4, torch.float32, N_EXPERTS)
    for view in views:
        view.fill_(77)
    for got, want in zip((call.rows, call.weights, call.slots), before, strict=True):
        assert torch.equal(got.cpu().to(want.dtype), want)


class Runtime:
    """CUDA's, which locks what it is told to, or fails."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: list[tuple[int, int]] = []

    def cudaHostRegister(self, start: int, n_bytes: int, flags: int) -> int:
        assert flags == 0
        self.locked += [] if self.error else [(start, n_bytes)]
        return self.error

    def cudaHostUnregister(self, start: int) -> int:
        return 0 if self.locked.pop()[0] == start else 1


@pytest.mark.parametrize("error", [0, 2])
def test_the_memory_of_all_buffers_is_locked_once_and_given_back(error: int) -> None:
    memory = memoryview(mmap.mmap(-1, 8 * mmap.PAGESIZE))
    runtime, page = Runtime(error), mmap.PAGESIZE
    buffers = [memory[page + 100 : page + 300], memory[3 * page : 5 * page + 1]]
    locked = PageLocked(buffers, torch.device("cpu"), runtime)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert runtime.locked == ([] if error else [(start + page, 4 * page + 1)])
    assert locked.is_locked == (not error)
    locked.close()
    locked.close()
    assert runtime.locked == []
    assert not locked.is_locked


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_lease_that_ends_gives_its_frames_back_unless_the_device_is_still_at_work(is_stuck: bool) -> None:
    layout = FrameLayout(64, 2, PayloadDtype.BF16, PayloadDtype.BF16, 8)
    arena, runtime = DeviceArena(layout, torch.bfloat16, DEVICE), Runtime()
    arena._pages = PageLocked([memoryview(mmap.mmap(-1, mmap.PAGESIZE))], DEVICE, runtime)

    def run(work: Callable[[], None]) -> None:
        if is_stuck:
            raise ServerError("the compute thread was busy")
        work()

    arena.close(run)
    assert bool(runtime.locked) == is_stuck


STAGED = """
import torch
from moeoffload.expert_server import lease
lease.HostArena = lambda *sizes: lease.DeviceArena(*sizes, torch.device("cpu"))
"""


def test_a_server_that_stages_its_frames_answers_the_same(start_server: StartServer, three_servers: list[str]) -> None:
    prompt = torch.tensor([[7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]])
    answers: list[list[torch.Tensor]] = []
    staged = start_server(patch=STAGED).address
    for address, transport in ((three_servers[0], "shared"), (staged, "shared"), (staged, "stream")):
        with (
            open_model(DEMO, experts=[address], transport=transport, device="cpu") as offloaded,
            torch.inference_mode(),
        ):
            first = offloaded.model(prompt)
            second = offloaded.model(torch.tensor([[20]]), past_key_values=first.past_key_values)
            answers.append([first.logits, second.logits])
    for answer in answers[1:]:
        assert all(torch.equal(got, expected) for got, expected in zip(answer, answers[0], strict=True))
