"""The grouped kernel as it runs on a GPU: the host never waits, absent routes lie behind all groups."""

from __future__ import annotations

import pytest
import torch
from experts_modules import make_experts

from moeoffload.kernels import KernelInput, grouped_experts
from moeoffload.kernels.layer import LayerKernels
from moeoffload.kernels.triton_experts import why_not_triton

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["silu", "ungated-relu2", "gpt_oss"])
@pytest.mark.parametrize("n_rows", [1, 40])
def test_not_waiting_changes_no_bit(kind: str, dtype: torch.dtype, n_rows: int) -> None:
    experts = make_experts(kind, n_experts=6, hidden=64, inter=32, dtype=dtype)
    generator = torch.Generator().manual_seed(n_rows)
    rows = torch.randn(n_rows, 64, generator=generator).to(dtype)
    weights = torch.rand(n_rows, 3, generator=generator)
    for absent in (0.0, 0.5, 1.0):
        slots = torch.randint(0, 6, (n_rows, 3), generator=generator)
        slots = torch.where(torch.rand(slots.shape, generator=generator) < absent, -1, slots)
        # Memory that no product writes is more often zero than not: this makes it stand out.
        torch.full((n_rows * 3 * 64,), float("nan"), dtype=dtype)
        expected = grouped_experts(experts, rows, slots, weights)
        assert torch.equal(grouped_experts(experts, rows, slots, weights, may_wait=False), expected)
        beyond = torch.where(slots < 0, 6, slots)
        assert torch.equal(grouped_experts(experts, rows, beyond, weights, may_wait=False), expected)


@pytest.mark.parametrize("kind", ["silu", "ungated-relu2", "gpt_oss"])
def test_no_value_is_read_by_the_host(kind: str) -> None:
    """On the meta device there are no values: whatever asked for one would raise."""
    experts = make_experts(kind, n_experts=6, hidden=64, inter=32, dtype=torch.bfloat16).to("meta")
    rows = torch.empty(5, 64, dtype=torch.bfloat16, device="meta")
    slots = torch.empty(5, 3, dtype=torch.int64, device="meta")
    weights = torch.empty(5, 3, device="meta")
    LayerKernels(experts)(KernelInput(rows, slots, weights, torch.empty(5, 64, device="meta")))
    with pytest.raises((RuntimeError, NotImplementedError)):
        grouped_experts(experts, rows, slots, weights)


def test_nothing_but_a_gpu_gets_the_triton_kernel() -> None:
    assert why_not_triton(make_experts("silu", 6, 64, 32, torch.bfloat16)) == "device cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: `make gpu` runs this on a machine that has one")
def test_a_gpu_layer_takes_the_triton_kernel_for_few_rows() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    experts = make_experts("silu", n_experts=6, hidden=64, inter=32, dtype=torch.bfloat16, device="cuda")
    layer = LayerKernels(experts)
    many = "grouped" if torch.cuda.get_device_capability() in ((9, 0), (10, 0)) else "triton"
    assert (layer.kernel_for(1), layer.kernel_for(17)) == ("triton", many)
    assert LayerKernels(experts, kernel="grouped").kernel_for(1) == "grouped"
    layer.reserve(64, 3)
    for n_rows in (1, 16, 17, 64):
        rows = torch.randn(n_rows, 64, device="cuda").bfloat16()
        slots = torch.randint(-1, 6, (n_rows, 3), device="cuda")
        weights, out = torch.rand(n_rows, 3, device="cuda"), torch.empty(n_rows, 64, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(KernelInput(rows, slots, weights, out))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = grouped_experts(experts, rows, slots, weights)
        assert (out - expected).abs().max() <= 0.02 * expected.abs().max()
