"""Calls of any shape, in slices, by any thread: a row's result depends on the row and its experts only."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from experts_modules import make_experts, reference

from moeoffload.kernels import KernelInput, KernelWorkspace, LayerKernels, calls, tiled

from .experts import DTYPES, call, gated_experts, random_call, random_rows, routes, threads


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_absent_routes_add_nothing_whatever_their_weight(dtype: torch.dtype) -> None:
    layer = LayerKernels(gated_experts(4, 64, 32, dtype), kernel="tiled")
    rows = random_rows(3, 64, dtype)
    slots = torch.tensor([[-1, 2], [-1, -1], [0, -1]])
    weights = torch.tensor([[torch.nan, 0.5], [torch.inf, torch.nan], [0.25, torch.inf]])
    out = call(layer, rows, slots, weights)
    assert torch.equal(out[1], torch.zeros(64))
    assert torch.equal(out[0:1], call(layer, rows[0:1], slots[0:1, 1:], weights[0:1, 1:]))
    assert torch.equal(out[2:3], call(layer, rows[2:3], slots[2:3, :1], weights[2:3, :1]))


def test_no_rows_no_top_k_and_no_route_present() -> None:
    layer = LayerKernels(gated_experts(4, 64, 32, torch.bfloat16))
    assert call(layer, torch.empty(0, 64).bfloat16(), torch.empty(0, 2).long(), torch.empty(0, 2)).shape == (0, 64)
    for slots in (torch.empty(2, 0).long(), torch.full((2, 3), -1)):
        out = call(layer, random_rows(2, 64, torch.bfloat16), slots, torch.ones(slots.shape))
        assert torch.equal(out, torch.zeros(2, 64))


def test_an_expert_twice_in_a_row_counts_twice() -> None:
    experts = gated_experts(4, 64, 32, torch.float32)
    layer = LayerKernels(experts, kernel="tiled")
    rows = random_rows(2, 64, torch.float32)
    slots, weights = torch.tensor([[1, 1, 1], [3, 0, 3]]), torch.tensor([[0.5, 0.25, 1.0], [1.0, 2.0, 0.5]])
    truth = reference(experts, rows, slots, weights).float()
    torch.testing.assert_close(call(layer, rows, slots, weights), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [-2, 4, 2**40])
@pytest.mark.parametrize("kernel", ["tiled", "grouped"])
def test_a_slot_that_does_not_exist_is_refused_and_nothing_is_written(bad: int, kernel: str) -> None:
    layer = LayerKernels(gated_experts(4, 64, 32, torch.bfloat16), kernel=kernel)  # type: ignore[arg-type]
    out = torch.full((3, 64), 7.0)
    slots = torch.tensor([[0, 1], [2, bad], [3, 3]])
    asked = KernelInput(random_rows(3, 64, torch.bfloat16), slots, torch.ones(3, 2), out)
    with pytest.raises(IndexError):
        layer(asked)
    with pytest.raises(IndexError, match="slot"):
        next(layer.in_slices(asked))
    assert torch.equal(out, torch.full((3, 64), 7.0))


def test_strided_inputs() -> None:
    layer = LayerKernels(gated_experts(4, 64, 32, torch.bfloat16))
    rows, slots, weights = random_call(6, 128, torch.bfloat16, 4, 4)
    strided = [each[::2, ::2] for each in (rows, slots, weights)]
    assert torch.equal(call(layer, *strided), call(layer, *(each.contiguous() for each in strided)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": torch.zeros(3, 63).bfloat16()}, {"out": torch.zeros(2, 64)}, {"weights": torch.zeros(3, 1)},
        {"rows": torch.zeros(3, 64)}, {"slots": torch.zeros(3, 2).int()}, {"weights": torch.zeros(3, 2).double()},
        {"out": torch.zeros(3, 64).bfloat16()},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(wrong: dict[str, torch.Tensor]) -> None:
    layer: Any = LayerKernels(gated_experts(4, 64, 32, torch.bfloat16))
    right: dict[str, Any] = {
        "rows": torch.zeros(3, 64).bfloat16(),
        "slots": torch.zeros(3, 2).long(),
        "weights": torch.zeros(3, 2),
        "out": torch.zeros(3, 64),
    }
    layer(KernelInput(**right))
    with pytest.raises(ValueError, match=r"expected|dtypes"):
        layer(KernelInput(**(right | wrong)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("inter", [40, 64])  # the second is one for the matrix unit
def test_non_finite_values_are_not_hidden(dtype: torch.dtype, bad: float, inter: int) -> None:
    experts = gated_experts(4, 96, inter, dtype)
    rows, slots, weights = random_call(3, 96, dtype, 2, 4)
    layer = LayerKernels(experts, kernel="tiled")
    clean = call(layer, rows, slots, weights)
    spoiled = rows.clone()
    spoiled[1, 50] = bad
    out = call(layer, spoiled, slots, weights)
    assert not out[1].isfinite().any()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    weights[2, 0] = bad
    out = call(layer, rows, slots, weights)
    assert not out[2].isfinite().any()
    assert torch.equal(out[:2], clean[:2])
    weights[2, 0] = 1.0
    experts.down_proj[slots[0, 0], 5, 7] = bad
    assert not call(layer, rows, slots, weights)[0, 5].isfinite()


SHAPE = (16, 320, 160)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_alone_and_together_have_the_same_bits(dtype: torch.dtype) -> None:
    n_experts, hidden, inter = SHAPE
    layer = LayerKernels(gated_experts(n_experts, hidden, inter, dtype), kernel="tiled")
    rows, slots, weights = random_call(150, hidden, dtype, 8, n_experts)
    together = call(layer, rows, slots, weights)
    for size in (1, 2, 3, 4, 6, 7, 13, 64):
        for start in range(0, 150, size):
            part = slice(start, start + size)
            assert torch.equal(call(layer, rows[part], slots[part], weights[part]), together[part]), (size, start)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_bits(dtype: torch.dtype) -> None:
    layer = LayerKernels(gated_experts(8, 512, 384, dtype), kernel="tiled")
    for n_rows in (1, 5, 40):
        rows, slots, weights = random_call(n_rows, 512, dtype, 4, 8, absent=0.1)
        with threads(1):
            alone = call(layer, rows, slots, weights)
        with threads(2):
            assert all(torch.equal(call(layer, rows, slots, weights), alone) for _ in range(20))


def test_threads_with_workspaces_of_their_own_do_not_disturb_each_other() -> None:
    layer = LayerKernels(gated_experts(8, 256, 128, torch.bfloat16))
    rows, slots, weights = random_call(12, 256, torch.bfloat16, 4, 8)
    expected = call(layer, rows, slots, weights)

    def is_right(_: int) -> bool:
        workspace, out = KernelWorkspace(), torch.empty(12, 256)
        for _ in range(200):
            layer(KernelInput(rows, slots, weights, out), workspace)
            if not torch.equal(out, expected):
                return False
        return True

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(is_right, range(3)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_workspace_has_room_for_more_rows_of_fewer_routes(dtype: torch.dtype) -> None:
    workspace = KernelWorkspace()
    layer = LayerKernels(gated_experts(8, 72, 32, dtype), workspace, "tiled")
    for n_rows, top_k in ((20, 4), (40, 2), (80, 1)):
        inputs = random_call(n_rows, 72, dtype, top_k, 8)
        result = call(layer, *inputs)
        assert torch.equal(result, call(LayerKernels(gated_experts(8, 72, 32, dtype), kernel="tiled"), *inputs))
        assert workspace.buffers["operands"].numel() >= n_rows * 72 * dtype.itemsize


@pytest.fixture
def tiny_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of one expert, and of at most seven of its routes."""
    monkeypatch.setattr(tiled, "SLICE_S", 1e-12)
    monkeypatch.setattr(tiled, "PIECE_ROUTES", 7)


def sliced(layer: LayerKernels, inputs: tuple[torch.Tensor, ...], between: Any = lambda: None) -> torch.Tensor:
    """The result of a call in slices, with ``between()`` after each."""
    rows, slots, weights = inputs
    out = torch.full(rows.shape, torch.nan, dtype=torch.float32)
    n_slices = 0
    for _ in layer.in_slices(KernelInput(rows, slots, weights, out)):
        n_slices += 1
        between()
    assert n_slices > 4, "it was one slice"
    return out


@pytest.mark.usefixtures("tiny_slices")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_rows", [1, 5, 60])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_slices_have_the_bits_of_one_call(dtype: torch.dtype, n_rows: int, n_threads: int) -> None:
    layer = LayerKernels(gated_experts(16, 320, 160, dtype), kernel="tiled")
    inputs = random_call(n_rows, 320, dtype, 8, 16, absent=0.2)
    with threads(n_threads):
        whole = call(layer, *inputs)
        assert torch.equal(sliced(layer, inputs), whole)
        assert torch.equal(call(layer, *inputs), whole), "a whole call after one in slices"


class Slices:
    """Records how many routes each slice of a projection has; by its clock UP takes 0.2 ms a route, DOWN 0.1 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.up: list[int] = []
        self.down: list[int] = []
        self._now = 0.0
        self._compute = tiled.TiledExperts._compute
        monkeypatch.setattr(tiled, "perf_counter", lambda: self._now)
        monkeypatch.setattr(tiled.TiledExperts, "_compute", lambda *call: self._record(*call))

    def _record(self, experts: Any, workspace: Any, steps: calls.Step) -> None:
        self._compute(experts, workspace, steps)
        n_routes = workspace.call.end - workspace.call.begin
        if steps & calls.Step.UP:
            self.up.append(n_routes)
            self._now += 0.2e-3 * n_routes
        elif steps & calls.Step.DOWN:
            self.down.append(n_routes)
            self._now += 0.1e-3 * n_routes

    def of_a_call(self, layer: LayerKernels, inputs: tuple[torch.Tensor, ...]) -> tuple[list[int], list[int]]:
        """Those of the last of some calls."""
        for _ in range(10):
            self.up, self.down = [], []
            rows, slots, weights = inputs
            for _ in layer.in_slices(KernelInput(rows, slots, weights, torch.empty(rows.shape))):
                pass
        return self.up, self.down


def test_slices_become_as_long_as_they_shall_by_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LayerKernels(gated_experts(16, 320, 160, torch.bfloat16), kernel="tiled")
    monkeypatch.setattr(tiled, "SLICE_S", 5.5e-3)
    slices = Slices(monkeypatch)
    rows, weights = random_rows(20, 320, torch.bfloat16), torch.full((20, 8), 1 / 8)
    slots = torch.arange(20 * 8).reshape(20, 8) % 16  # 10 routes each
    up, down = slices.of_a_call(layer, (rows, slots, weights))
    assert up == [30, 30, 30, 30, 30, 10], "whole experts, until they take long enough"
    assert down == [60, 60, 40]


@pytest.mark.usefixtures("tiny_slices")
def test_another_call_in_between_disturbs_neither() -> None:
    layer = LayerKernels(gated_experts(16, 320, 160, torch.bfloat16), kernel="tiled")
    other, urgent = LayerKernels(gated_experts(8, 320, 160, torch.bfloat16, seed=1), kernel="tiled"), KernelWorkspace()
    large = random_call(64, 320, torch.bfloat16, 8, 16)
    small = (random_rows(2, 320, torch.bfloat16, seed=2), *routes(2, 4, 8))
    expected, expected_small = call(layer, *large), call(other, *small)
    results = []

    def between() -> None:
        out = torch.full(small[0].shape, torch.nan, dtype=torch.float32)
        other(KernelInput(*small, out), urgent)
        results.append(out)

    assert torch.equal(sliced(layer, large, between), expected)
    assert all(torch.equal(result, expected_small) for result in results)


@pytest.mark.usefixtures("tiny_slices")
def test_experts_with_bias_and_an_activation_of_their_own() -> None:
    experts = make_experts("gpt_oss", 8, 128, 96, torch.float32, seed=1)
    layer = LayerKernels(experts, kernel="tiled")
    inputs = random_call(40, 128, torch.float32, 2, 8, absent=0.2)
    assert torch.equal(sliced(layer, inputs), call(layer, *inputs))
