"""The Triton programs for packed weights, against those for what they unpack to; in Triton's interpreter without a GPU.

Tolerance: where both read the inner dimension in the same steps, the same bits; else `BOUNDS` of the largest value.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_kernels.test_packed import MIXES
from experts_modules import BY_NAME, FORMATS, make_experts, make_packed, random_packed, without_the_least

from moeoffload.formats.packed import Codes, PackedFormat, PackedWeights, Scales
from moeoffload.kernels.triton_experts import TritonExperts, why_not_computed

from .test_triton import BOUNDS, DEVICE, assert_close, compiled, compute, random_call

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # noqa: E402

from moeoffload.kernels.triton_packed import row_format, unpacked  # noqa: E402

PLAIN_CODES = (Codes.BFLOAT16, Codes.FLOAT16, Codes.FLOAT32)
OF_EACH_KIND = ("fp8 blocks", "int8 F16 32", "mxfp4", "int4 F16 128 ZERO", "q4_k", "q5_k", "q6_k", "iq4_xs", "FLOAT32")


@pytest.fixture(autouse=True)
def sums_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies with numpy, which adds in an order that depends on shapes and strides."""

    def dot(
        self: Any, a: TensorHandle, b: TensorHandle, total: TensorHandle, input_precision: Any, most: Any
    ) -> TensorHandle:
        products = a.data[:, :, None] * np.ascontiguousarray(b.data)[None]
        return TensorHandle(products.sum(axis=1, dtype=np.float32) + total.data, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@triton.jit
def unpack_program(
    data: tl.tensor,
    shared: tl.tensor,
    out: tl.tensor,
    n_rows: tl.tensor,
    form: tl.constexpr,
    tile_rows: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    start = tl.program_id(1) * depth
    values = unpacked(data, shared, row, row < n_rows, start, form, depth)
    column = start + tl.arange(0, depth)
    exists = (row < n_rows)[:, None] & (column < form.n_in)[None, :]
    tl.store(out + row[:, None] * form.n_in + column[None, :], values, mask=exists)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_every_code_and_scale_becomes_the_number_it_stands_for(form: PackedFormat) -> None:
    n_rows, n_in = 20, 195  # no whole number of tiles, groups, or bytes of codes
    packed = without_the_least(random_packed(form, 1, n_rows, n_in))
    if form.codes not in PLAIN_CODES and form.scales is not Scales.BF16:
        # All bytes, those for NaN and infinity among them.
        packed.data.copy_(torch.randint(0, 256, packed.data.shape, generator=torch.manual_seed(0), dtype=torch.uint8))
    expected = packed.unpack(torch.float32)[0]
    shared = None if packed.scales is None else packed.scales.to(DEVICE)
    out = torch.full((n_rows, n_in), 7.0, device=DEVICE)
    unpack_program[(2, 4)](packed.data.to(DEVICE), shared, out, n_rows, row_format(packed), 16, 64)
    is_same = (out.cpu() == expected) | (out.cpu().isnan() & expected.isnan())
    assert is_same.all()


def results(pair: tuple[Any, Any], n_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    packed, plain = pair
    assert why_not_computed(packed) is None
    n_experts, hidden = packed.down_proj[0].shape[:2]
    rows, slots, weights = random_call(n_rows, 2, n_experts, hidden, dtype, seed=n_rows)
    found, expected = compute(packed, rows, slots, weights), compute(plain, rows, slots, weights)
    assert found.isfinite().all()
    assert expected.abs().max() > 2.0**-20, "else this compares zeros"
    return found, expected


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_every_kind_of_codes_gives_the_bits_of_what_it_unpacks_to(name: str) -> None:
    pair = make_packed("silu", (BY_NAME[name],), (2, 160, 37), torch.bfloat16, DEVICE)
    for n_rows in (3, 40) if name in ("fp8 blocks", "q4_k") else (3,):
        assert torch.equal(*results(pair, n_rows, torch.bfloat16)), n_rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["fp8 channels", "mxfp4", "q5_k"])
def test_other_compute_dtypes(name: str, dtype: torch.dtype) -> None:
    pair = make_packed("ungated-relu2", (BY_NAME[name],), (2, 160, 33), dtype, DEVICE)
    for n_rows in (1, 16):
        assert torch.equal(*results(pair, n_rows, dtype)), n_rows


@pytest.mark.parametrize(("name", "dtype"), [("mxfp4", torch.bfloat16), ("q6_k", torch.float32)], ids=str)
def test_biases_and_clamped_interleaved_gates(name: str, dtype: torch.dtype) -> None:
    """The plain weights are stored (in, out) here, and read in other steps."""
    pair = make_packed("gpt_oss", (BY_NAME[name],), (2, 96, 40), dtype, DEVICE)
    for n_rows in (1, 3, 16, 40):
        assert_close(*results(pair, n_rows, dtype), BOUNDS[dtype])


@pytest.mark.parametrize("names", MIXES, ids=str)
def test_gate_and_up_of_two_formats(names: tuple[str, str]) -> None:
    pair = make_packed("silu", (BY_NAME[names[0]], BY_NAME[names[1]]), (2, 144, 24), torch.bfloat16, DEVICE)
    for n_rows in (3, 40):
        assert torch.equal(*results(pair, n_rows, torch.bfloat16)), n_rows


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    packed, _ = make_packed("silu", (BY_NAME["q4_k"],), (3, 160, 24), torch.bfloat16, DEVICE)
    rows, slots, weights = random_call(40, 2, 3, 160, torch.bfloat16)
    together = compute(packed, rows, slots, weights)
    for part in (slice(0, 16), slice(39, 40), slice(10, 27)):
        assert torch.equal(compute(packed, rows[part], slots[part], weights[part]), together[part])


def test_nothing_is_read_of_experts_that_nobody_uses() -> None:
    for n_rows in (2, 20):
        packed, _ = make_packed("silu", (BY_NAME["fp8 blocks"],), (3, 96, 24), torch.bfloat16, DEVICE)
        rows, _, weights = random_call(n_rows, 2, 3, 96, torch.bfloat16)
        slots = torch.tensor([[1, -1]], device=DEVICE).expand(n_rows, 2)
        clean = compute(packed, rows, slots, weights)
        for parts in (packed.gate_up_proj, packed.down_proj):
            parts[0].data[[0, 2]] = 0x7F
            parts[0].scales[[0, 2]] = torch.nan
        assert torch.equal(compute(packed, rows, slots, weights), clean)


def test_what_is_not_computed_is_named() -> None:
    shape = 2, 64, 32
    strange = replace(BY_NAME["mxfp4"], name="strange", levels=tuple(0.1 * n * n for n in range(16)))
    uneven = PackedFormat("uneven", Codes.INT8, Scales.F16, group=48)
    for kind, forms, reason in (
        ("silu", (strange,), "strange: levels that are no bytes"),
        ("silu", (uneven,), "uneven: groups of 48 weights"),
        ("gpt_oss", (BY_NAME["mxfp4"], BY_NAME["q4_k"]), "a projection in two formats"),
        ("mish", (BY_NAME["mxfp4"],), "an activation of its own"),
    ):
        assert why_not_computed(make_packed(kind, forms, shape, torch.bfloat16, DEVICE)[0]) == reason


def test_large_calls_of_packed_experts_need_no_other_kernel() -> None:
    packed, _ = make_packed("silu", (BY_NAME["q4_k"],), (2, 256, 32), torch.bfloat16, DEVICE)
    assert TritonExperts(packed).most_rows >= 1 << 20
    assert isinstance(packed.down_proj[0], PackedWeights)
    assert why_not_computed(make_experts("silu", 2, 64, 32, torch.bfloat16, DEVICE)) is None


def test_the_programs_compile_for_all_gpus_that_triton_knows(tmp_path: Path) -> None:
    """Few and many rows, plain and packed: hardly a spilt register, whole words in each copy, tensor cores."""
    lines = compiled(tmp_path, "bf16", "90", "-", "80", "86", "89", "100", "120")
    assert len(lines) == (4 * 3 + 9) + 5 * (3 + 3)
    for line in lines:
        assert re.search(r" [08] bytes spilt", line), line
        if "sum_program" not in line:
            assert re.search(r"copies of \[(4, )?(8, )?16\] bytes", line), line
            assert "tensor cores True" in line, line
