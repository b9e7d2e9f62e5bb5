"""A decode step on a server, frame to frame: the bits of the long way, refusals, and nothing that is kept alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from cpu_kernels.experts import gated_experts

from moeoffload.expert_server.compiled_steps import CompiledSteps
from moeoffload.expert_server.requests import ActiveHost, SlotContext
from moeoffload.expert_server.workspace import Workspace
from moeoffload.kernels import KernelWorkspace, LayerKernels, prepare_layer
from moeoffload.kernels.turnaround_words import MOST_ROWS
from moeoffload.payload import PayloadDtype
from moeoffload.transport import ServerSlot
from moeoffload.wire import HEADER_BYTES, Flag, FrameHeader, FrameLayout, Kind, SlotViews

N_EXPERTS, HIDDEN, INTER, TOP_K, EPOCH = 6, 64, 32, 3, 5
CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Slot:
    """A slot of a host with its experts."""

    def __init__(
        self,
        layers: list[LayerKernels | None],
        dtype: torch.dtype,
        payload: torch.dtype,
        back: torch.dtype | None = None,
    ) -> None:
        self.layers, self.dtype = layers, dtype
        codes = [PayloadDtype.from_torch(each) for each in (payload, back or payload)]
        self.layout = FrameLayout(HIDDEN, TOP_K, codes[0], codes[1], 16)
        self.slot = ServerSlot(
            0, memoryview(bytearray(self.layout.request_bytes)), memoryview(bytearray(self.layout.reply_bytes))
        )
        self.workspace = Workspace(self.layout, dtype, CPU)
        nobody: Any = None
        self.host = ActiveHost(EPOCH, self.layout, layers, dtype, self.workspace, nobody)
        self.context = SlotContext(self.host, self.slot)
        self.views = SlotViews(self.layout, self.slot.request, self.slot.reply)

    def steps(self) -> CompiledSteps:
        steps = self.host.make_steps()
        assert steps is not None
        return steps

    def fill(self, n_rows: int, seed: int, layer: int = 0, flags: int = Flag.WEIGHTS_F32) -> int:
        """A request made from a seed; its bytes."""
        generator = torch.manual_seed(seed)
        views = self.views.dispatch(n_rows)
        views.rows.copy_(torch.randn(n_rows, HIDDEN, generator=generator))
        views.weights.copy_(torch.rand(n_rows, TOP_K, generator=generator))
        order = torch.rand(n_rows, N_EXPERTS + 2, generator=generator).argsort(dim=1)[:, :TOP_K]
        views.slots.copy_(order.masked_fill(order >= N_EXPERTS, -1))
        layout = self.layout
        header = FrameHeader(
            Kind.DISPATCH, layout.dtype_out, layout.dtype_back, 9, EPOCH, layer, TOP_K, n_rows, flags,
            layout.dispatch_body_bytes(n_rows),
        )  # fmt: skip
        header.pack_into(self.slot.request)
        return HEADER_BYTES + header.body_bytes

    def answer(self, steps: CompiledSteps, n_bytes: int, queue_s: float = 0.0) -> int:
        places = self.context.places
        assert places is not None
        return steps.answer(places.request, n_bytes, places.reply, queue_s)

    def long_way(self, layer: LayerKernels, n_rows: int, weights_dtype: torch.dtype) -> torch.Tensor:
        """The reply of the path that large requests take."""
        arena = self.workspace.arena(n_rows)
        call = arena.fill(self.views.dispatch(n_rows), n_rows, weights_dtype, N_EXPERTS)
        layer(call.rows, call.slots, call.weights, call.out)
        reply = torch.empty(n_rows, HIDDEN, dtype=self.layout.dtype_back.torch_dtype)
        assert arena.finish(call, reply) is None
        return reply


def layer_of(dtype: torch.dtype, inter: int = INTER, workspace: KernelWorkspace | None = None) -> LayerKernels:
    return prepare_layer(gated_experts(N_EXPERTS, HIDDEN, inter, dtype), workspace or KernelWorkspace(), "tiled")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("payload", DTYPES)
@pytest.mark.parametrize("weights", ["float32", "compute dtype"])
def test_the_sums_have_the_bits_of_the_long_way(dtype: torch.dtype, payload: torch.dtype, weights: str) -> None:
    flags, weights_dtype = (Flag.WEIGHTS_F32, torch.float32) if weights == "float32" else (Flag.NONE, dtype)
    layer = layer_of(dtype)
    slot = Slot([None, layer], dtype, payload)
    steps = slot.steps()
    for n_rows in (1, 2, MOST_ROWS):
        for seed in range(3):
            n_bytes = slot.fill(n_rows, seed, layer=1, flags=flags)
            n_back = slot.answer(steps, n_bytes, queue_s=0.25)
            header = FrameHeader()
            header.unpack_from(slot.slot.reply)
            assert (header.kind, header.request_id, header.epoch, header.layer) == (Kind.COMBINE, 9, EPOCH, 1)
            assert header.queue_us == 250_000
            assert n_back == HEADER_BYTES + header.body_bytes
            slot.layout.check_combine(header, n_back, n_rows)
            got = slot.views.combine(n_rows).clone()
            assert torch.equal(got, slot.long_way(layer, n_rows, weights_dtype))
            assert got.abs().sum() > 0


def test_layers_of_another_shape_are_left_to_others() -> None:
    workspace = KernelWorkspace()
    layers = [layer_of(torch.bfloat16, inter, workspace) for inter in (32, 48, 32)]
    slot = Slot([*layers, None], torch.bfloat16, torch.bfloat16)
    steps = slot.steps()
    assert [slot.answer(steps, slot.fill(2, 0, layer=layer)) > 0 for layer in range(5)] == [
        True,
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("bad", [N_EXPERTS, -2, 32_767])
def test_a_slot_that_is_no_experts_is_refused(bad: int) -> None:
    slot = Slot([layer_of(torch.bfloat16)], torch.bfloat16, torch.bfloat16)
    steps = slot.steps()
    n_bytes = slot.fill(2, 0)
    slot.views.dispatch(2).slots[1, 2] = bad
    assert not slot.answer(steps, n_bytes)
    assert slot.answer(steps, slot.fill(2, 1))


def test_a_row_that_is_not_finite_is_refused() -> None:
    slot = Slot([layer_of(torch.bfloat16)], torch.bfloat16, torch.bfloat16)
    n_bytes = slot.fill(3, 0)
    slot.views.dispatch(3).rows[1] = float("nan")
    slot.views.dispatch(3).slots[1, 0] = 0
    assert not slot.answer(slot.steps(), n_bytes)


def test_more_rows_or_other_bytes_are_refused() -> None:
    slot = Slot([layer_of(torch.bfloat16)], torch.bfloat16, torch.bfloat16)
    steps = slot.steps()
    assert not slot.answer(steps, slot.fill(MOST_ROWS + 1, 0))
    n_bytes = slot.fill(2, 0)
    assert not slot.answer(steps, n_bytes - 2)
    assert not slot.answer(steps, slot.layout.request_bytes)
    slot.slot.request[60] ^= 1  # the checksum
    assert not slot.answer(steps, n_bytes)


def test_nothing_of_a_dropped_slot_stays() -> None:
    slot = Slot([layer_of(torch.bfloat16)], torch.bfloat16, torch.bfloat16)
    slot.answer(slot.steps(), slot.fill(1, 0))
    places = slot.context.places
    assert places is not None
    seen = [weakref.ref(each) for each in places.kept]
    slot.context.drop()
    del places
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    assert slot.context.places is None
