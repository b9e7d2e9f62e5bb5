"""The Triton programs for few rows: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experts_modules import make_experts, reference

from moeoffload.kernels import grouped_experts
from moeoffload.kernels.activation import recognise
from moeoffload.kernels.triton_experts import MAX_ROWS, TritonExperts, why_no_program_runs

triton = pytest.importorskip("triton", reason="triton is not installed")
from moeoffload.kernels import triton_ops  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
    pytest.skip("no GPU, and Triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

# Against float32 without rounding, relative to the largest value: the rounding steps of each dtype, and their spread.
BOUNDS = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = list(BOUNDS)
KINDS = ["silu", "gelu", "gelu_pytorch_tanh", "relu2", "ungated-relu2", "ungated-silu", "gpt_oss"]


def random_call(
    n_rows: int, top_k: int, n_experts: int, hidden: int, dtype: torch.dtype, absent: float = 0.25, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, slots and float32 weights; each row names different experts, a share of its routes is absent."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n_rows, hidden, generator=generator)
    slots = torch.rand(n_rows, n_experts, generator=generator).argsort(dim=1)[:, :top_k]
    slots = torch.where(torch.rand(slots.shape, generator=generator) < absent, -1, slots)
    weights = torch.rand(n_rows, top_k, generator=generator) + 0.1
    return rows.to(DEVICE, dtype), slots.contiguous().to(DEVICE), weights.to(DEVICE)


def compute(experts: torch.nn.Module, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.full(rows.shape, float("nan"), device=DEVICE)
    TritonExperts(experts)(rows, slots, weights, out)
    return out


def assert_close(out: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert torch.isfinite(out).all()
    assert (out - expected).abs().max() <= bound * expected.abs().max().clamp(min=1e-3)


# The interpreter is slow: every kind in float32, the shorter dtypes for one with a gate of each layout.
CASES = [*((kind, torch.float32) for kind in KINDS)]
CASES += [(kind, dtype) for kind in ("silu", "gpt_oss") for dtype in (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_every_kind_of_experts_gives_what_the_formula_says(kind: str, dtype: torch.dtype) -> None:
    experts = make_experts(kind, n_experts=6, hidden=96, inter=40, dtype=dtype, device=DEVICE)
    rows, slots, weights = random_call(5, 3, 6, 96, dtype)
    out = compute(experts, rows, slots, weights)
    assert_close(out, reference(experts, rows, slots, weights), BOUNDS[dtype])


@pytest.mark.parametrize(("kind", "dtype"), CASES[len(KINDS) :], ids=str)
def test_roundings_are_those_of_the_grouped_kernel(kind: str, dtype: torch.dtype) -> None:
    experts = make_experts(kind, n_experts=6, hidden=96, inter=64, dtype=dtype, device=DEVICE, seed=1)
    rows, slots, weights = random_call(8, 4, 6, 96, dtype, seed=1)
    for route_weights in (weights, weights.to(dtype)):
        out = compute(experts, rows, slots, route_weights)
        expected = grouped_experts(experts, rows, slots, route_weights)
        assert_close(out, expected, BOUNDS[dtype])
        # Only where another order of a sum crosses the middle between two values of the dtype do bits differ.
        assert (out != expected).float().mean() < (0.05 if route_weights is weights else 0.02)


@pytest.mark.parametrize(
    ("kind", "n_rows", "hidden", "inter", "top_k", "n_experts"),
    [
        # Every number of rows for which the tiles are others.
        *(("silu", n_rows, 64, 32, 3, 7) for n_rows in (1, 2, 4, 7, 9, MAX_ROWS, MAX_ROWS + 1, 75)),
        ("silu", 3, 2, 1, 1, 1), ("gpt_oss", 3, 34, 17, 1, 2), ("silu", 3, 130, 70, 5, 5),
        ("gpt_oss", 3, 258, 33, 8, 9), ("silu", 3, 64, 200, 2, 3), ("gpt_oss", 3, 100, 100, 7, 64),
    ],
)  # fmt: skip
def test_odd_shapes_and_numbers_of_rows(
    kind: str, n_rows: int, hidden: int, inter: int, top_k: int, n_experts: int
) -> None:
    experts = make_experts(kind, n_experts, hidden, inter, dtype=torch.float16, device=DEVICE)
    rows, slots, weights = random_call(n_rows, top_k, n_experts, hidden, torch.float16, seed=n_rows)
    out = compute(experts, rows, slots, weights)
    assert_close(out, reference(experts, rows, slots, weights), BOUNDS[torch.float16])


def test_nothing_is_read_of_experts_that_nobody_uses_nor_for_absent_routes() -> None:
    experts = make_experts("silu", n_experts=4, hidden=64, inter=32, dtype=torch.bfloat16, device=DEVICE)
    rows, _, weights = random_call(4, 3, 4, 64, torch.bfloat16)
    slots = torch.tensor([[1, -1, 3], [-1, -1, -1], [3, 1, -1], [-1, -1, 1]], device=DEVICE)
    clean = compute(experts, rows, slots, weights)
    for expert in (0, 2):
        experts.gate_up_proj[expert] = float("nan")
        experts.down_proj[expert] = float("nan")
    weights = torch.where(slots < 0, float("nan"), weights)
    rows[1] = float("nan")  # none of its experts is here
    out = compute(experts, rows, slots, weights)
    assert torch.equal(out, clean)
    assert not out[1].any()


def test_many_rows_give_what_few_give() -> None:
    """Three experts: tiles that are full, and others; duplicates and slots that do not exist among them."""
    experts = make_experts("gpt_oss", n_experts=3, hidden=64, inter=32, dtype=torch.float32, device=DEVICE)
    rows, slots, weights = random_call(75, 3, 3, 64, torch.float32)
    slots[3], slots[4], slots[5] = torch.tensor([[1, 1, 1], [3, 1 << 40, -2], [2, 0, 2]], device=DEVICE)
    together = compute(experts, rows, slots, weights)
    assert_close(together, reference(experts, rows, torch.where(slots > 2, -1, slots), weights), BOUNDS[torch.float32])
    for part in (slice(0, 16), slice(70, 75)):
        few = compute(experts, rows[part], slots[part], weights[part])
        assert_close(few, together[part], BOUNDS[torch.float32])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    experts = make_experts("silu", n_experts=5, hidden=64, inter=32, dtype=torch.bfloat16, device=DEVICE)
    rows, slots, weights = random_call(16, 3, 5, 64, torch.bfloat16)
    together = compute(experts, rows, slots, weights)
    for n in (0, 7, 15):
        alone = compute(experts, rows[n : n + 1], slots[n : n + 1], weights[n : n + 1])
        assert torch.equal(alone[0], together[n])
    rows[3] = float("inf")
    spoilt = compute(experts, rows, slots, weights)
    others = [n for n in range(16) if n != 3]
    assert torch.equal(spoilt[others], together[others])


def test_the_formula_is_found_by_asking_the_module() -> None:
    def found(kind: str, dtype: torch.dtype) -> str:
        activation = recognise(make_experts(kind, 2, 8, 8, dtype, DEVICE))
        if activation is None:
            return "none"
        return f"{activation.function} {activation.is_gated} {activation.is_interleaved}"

    for dtype in DTYPES:
        assert found("silu", dtype) == "silu True False"
        assert found("gelu", dtype) == "gelu True False"
        assert found("gelu_pytorch_tanh", dtype) == "gelu_tanh True False"
        assert found("ungated-relu2", dtype) == "relu2 False False"
        assert found("gpt_oss", dtype) == "clamped_swiglu True True"
        assert found("mish", dtype) == "none"
        assert found("quick_gelu", dtype) == "none"


def test_triton_that_cannot_run_a_program_is_found_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device(DEVICE)
    try_out = why_no_program_runs.__wrapped__
    assert try_out(device) is None

    class Broken:
        def __getitem__(self, grid: tuple[int, ...]) -> None:
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr(triton_ops, "sum_program", Broken())
    reason = try_out(device) or ""
    assert "Failed to find C compiler." in reason
    assert "gcc" in reason
    monkeypatch.setitem(sys.modules, "triton", None)
    assert try_out(device) == "triton is not installed"


def test_warming_up_compiles_what_calls_of_any_size_need() -> None:
    experts = TritonExperts(make_experts("silu", n_experts=40, hidden=256, inter=64, dtype=torch.bfloat16))
    experts._n_processors = 16
    noted: set[Any] = set()
    programs = {name: Noted(name, noted) for name in ("projection_program", "sum_program")}
    experts._ops = SimpleNamespace(**programs)  # type: ignore[assignment]
    experts.warm_up(4)
    warm = set(noted)
    assert warm
    noted.clear()
    for n_rows in (1, 2, 3, 5, 8, 16, 17, 30, 100):
        rows, slots, weights = random_call(n_rows, 4, 40, 256, torch.bfloat16)
        experts(rows, slots, weights, torch.empty(rows.shape))
    assert noted <= warm


class Noted:
    """Stands for a program: notes what it would be compiled for."""

    def __init__(self, name: str, noted: set[Any]) -> None:
        self._name, self._noted = name, noted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            types = tuple(each.dtype if isinstance(each, torch.Tensor) else each is None for each in arguments)
            self._noted.add((self._name, types, *sorted(options.items())))

        return launch


def compiled(cache: Path, *arguments: str) -> list[str]:
    """What `compile_triton` prints, in a process without the interpreter."""
    tests = Path(__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DISABLE_LINE_INFO": "1"}
    environment |= {"PYTHONPATH": f"{tests.parent}{os.pathsep}{tests.parent / 'bench'}"}
    command = [sys.executable, "-m", "gpu_kernels.compile_triton", *arguments]
    text = subprocess.run(command, check=True, cwd=tests, env=environment, stdout=subprocess.PIPE, text=True).stdout
    return text.splitlines()
