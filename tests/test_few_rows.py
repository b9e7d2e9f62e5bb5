"""A decode step on a server: the compiled way has the bits of the long one, and keeps nothing alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from cpu_kernels.experts import gated_experts

from moeoffload.errors import ServerError
from moeoffload.expert_server.few_rows import MOST_ROWS, FewRows
from moeoffload.expert_server.requests import ActiveHost, SlotContext
from moeoffload.expert_server.workspace import Workspace
from moeoffload.kernels import KernelWorkspace, LayerKernels, prepare_layer
from moeoffload.payload import PayloadDtype
from moeoffload.transport import ServerSlot
from moeoffload.wire import Flag, FrameLayout, SlotViews

N_EXPERTS, HIDDEN, INTER, TOP_K = 6, 64, 32, 3
CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Slot:
    """A slot with its views, and what it is computed with."""

    def __init__(self, dtype: torch.dtype, payload: torch.dtype, back: torch.dtype | None = None) -> None:
        codes = [PayloadDtype.from_torch(each) for each in (payload, back or payload)]
        self.layout = FrameLayout(HIDDEN, TOP_K, codes[0], codes[1], 16)
        self.slot = ServerSlot(
            0, memoryview(bytearray(self.layout.request_bytes)), memoryview(bytearray(self.layout.reply_bytes))
        )
        self.views = SlotViews(self.layout, self.slot.request, self.slot.reply)
        self.workspace = Workspace(self.layout, dtype, CPU)

    def few(self, n_rows: int, weights_dtype: torch.dtype) -> FewRows:
        return FewRows(self.workspace, self.views, n_rows, weights_dtype)

    def fill(self, n_rows: int, seed: int) -> None:
        generator = torch.manual_seed(seed)
        views = self.views.dispatch(n_rows)
        views.rows.copy_(torch.randn(n_rows, HIDDEN, generator=generator))
        views.weights.copy_(torch.rand(n_rows, TOP_K, generator=generator))
        order = torch.rand(n_rows, N_EXPERTS + 2, generator=generator).argsort(dim=1)[:, :TOP_K]
        views.slots.copy_(order.masked_fill(order >= N_EXPERTS, -1))

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
@pytest.mark.parametrize("back", DTYPES)
@pytest.mark.parametrize("weights", ["float32", "compute dtype"])
def test_the_sums_have_the_bits_of_the_long_way(dtype: torch.dtype, back: torch.dtype, weights: str) -> None:
    weights_dtype = torch.float32 if weights == "float32" else dtype
    slot, layer = Slot(dtype, dtype, back), layer_of(dtype)
    for n_rows in (1, 2, MOST_ROWS):
        few = slot.few(n_rows, weights_dtype)
        for seed in range(3):  # the same object again and again
            slot.fill(n_rows, seed)
            assert few.compute(layer) is None
            got = slot.views.combine(n_rows).clone()
            assert torch.equal(got, slot.long_way(layer, n_rows, weights_dtype))
            assert got.abs().sum() > 0


def test_layers_of_other_shapes_take_turns_with_it() -> None:
    workspace = KernelWorkspace()
    slot = Slot(torch.bfloat16, torch.bfloat16)
    layers = [layer_of(torch.bfloat16, inter, workspace) for inter in (32, 64, 32, 16)]
    assert layers[0].shape is layers[2].shape
    few = slot.few(2, torch.float32)
    for seed, layer in enumerate([*layers, *reversed(layers)]):
        slot.fill(2, seed)
        few.compute(layer)
        got = slot.views.combine(2).clone()
        assert torch.equal(got, slot.long_way(layer, 2, torch.float32))


@pytest.mark.parametrize("bad", [N_EXPERTS, -2, 32_767])
def test_a_slot_that_is_no_experts_is_refused(bad: int) -> None:
    slot, layer = Slot(torch.bfloat16, torch.bfloat16), layer_of(torch.bfloat16)
    slot.fill(2, 0)
    few = slot.few(2, torch.float32)
    slot.views.dispatch(2).slots[1, 2] = bad
    with pytest.raises(IndexError):
        few.compute(layer)
    slot.fill(2, 1)
    assert few.compute(layer) is None


def test_a_row_that_is_not_finite_is_named() -> None:
    slot, layer = Slot(torch.bfloat16, torch.bfloat16), layer_of(torch.bfloat16)
    slot.fill(3, 0)
    slot.views.dispatch(3).rows[1] = float("nan")
    slot.views.dispatch(3).slots[1, 0] = 0
    assert slot.few(3, torch.float32).compute(layer) == 1


def test_rows_that_are_converted_go_the_long_way() -> None:
    assert not Slot(torch.bfloat16, torch.float16).few(1, torch.float32).is_possible
    assert Slot(torch.bfloat16, torch.bfloat16).few(1, torch.float32).is_possible


def context_for(slot: Slot) -> SlotContext:
    nobody: Any = None
    host = ActiveHost(1, slot.layout, [], torch.bfloat16, slot.workspace, nobody)
    return SlotContext(host, slot.slot)


def test_a_slot_has_one_for_each_number_of_rows_and_follows_the_header() -> None:
    context = context_for(Slot(torch.bfloat16, torch.bfloat16))
    context.header.rows, context.header.flags = 1, Flag.WEIGHTS_F32
    few = context.few_rows()
    assert few is not None
    assert context.few_rows() is few
    context.header.flags = 0  # weights of the compute dtype, which this one was not made for
    assert context.few_rows() is None
    context.header.rows = 2
    other = context.few_rows()
    assert other is not None
    assert other.weights_dtype is torch.bfloat16
    context.header.rows = MOST_ROWS + 1
    assert context.few_rows() is None


def test_nothing_of_a_dropped_slot_stays() -> None:
    slot, layer = Slot(torch.bfloat16, torch.bfloat16), layer_of(torch.bfloat16)
    context = context_for(slot)
    context.header.rows = 1
    few = context.few_rows()
    assert few is not None
    few.compute(layer)
    seen = [weakref.ref(each) for each in (context.views.combine(1), context.views.dispatch(1).rows)]
    context.drop()
    del few
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    with pytest.raises(ServerError):
        context.few_rows()
