"""Packed rows: the bits of the plain kernels on the weights unpacked, in every format, dtype and number of rows.

Tiles of integers, which are computed instead where there is no matrix unit, are those of test_tiles.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experts_modules import BY_NAME, make_packed, pack_experts, random_packed, unpacked
from models import tiny
from synthetic import TINY_FAMILIES

from moeoffload import native
from moeoffload.checkpoint import Checkpoint
from moeoffload.formats.packed import Codes, PackedFormat, PackedWeights, Scales
from moeoffload.kernels import KernelInput, LayerKernels, grouped_experts
from moeoffload.kernels.dense import PackedEmbedding, PackedLinear
from moeoffload.native import Features

from .experts import DTYPES, call, few_row_linear, gated_experts, instruction_sets, random_call, random_rows, threads

MIXES = (("q4_k", "q6_k"), ("BFLOAT16", "fp8 blocks"), ("mxfp4", "q5_k"))
SETS = instruction_sets()
KINDS = (
    "fp8 blocks",
    "mxfp8",
    "int8 F16 32",
    "int8 zero",
    "mxfp4",
    "int4 BF16 128 ZERO",
    "q4_k",
    "q5_k",
    "q6_k",
    "FLOAT32",
)
"""A format of each kind of codes, scales and offsets."""
CASES = [
    pytest.param(features, BY_NAME[name], dtype, id=f"{name}-{dtype}-{features}")
    for features in SETS
    # Products of bfloat16 pairs and the matrix unit are for bfloat16 alone.
    for dtype in (DTYPES if Features.BF16_DOT not in features else DTYPES[:1])
    for name in (BY_NAME if features is SETS[-1] else KINDS)
]


@pytest.fixture(autouse=True)
def rows_stay_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeoffload.kernels.packing.multiplies_tiles", lambda *_: False)


def two_modules(
    forms: tuple[PackedFormat, ...], down: PackedFormat, shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Any, Any]:
    """The same experts packed, and unpacked."""
    return make_packed("silu", forms, shape, dtype, down=down, keep_the_least=True)


def assert_same_bits(packed: Any, plain: Any, dtype: torch.dtype, all_rows: tuple[int, ...]) -> None:
    layers = LayerKernels(packed, kernel="tiled"), LayerKernels(plain, kernel="tiled")
    n_experts, hidden = layers[1].n_experts, layers[1].hidden
    for n_rows in all_rows:
        rows, slots, weights = random_call(n_rows, hidden, dtype, 2, n_experts, seed=n_rows, absent=0.1)
        result, expected = (call(layer, rows, slots, weights) for layer in layers)
        assert result.isfinite().all()
        assert result.abs().max() > 2.0**-20, "else this compares zeros"
        assert torch.equal(result, expected), n_rows
        for row in range(0, n_rows, 1 + n_rows // 3):
            one = slice(row, row + 1)
            assert torch.equal(call(layers[0], rows[one], slots[one], weights[one]), result[one]), (n_rows, row)


@pytest.mark.parametrize(("features", "form", "dtype"), CASES)
def test_experts(features: Features, form: PackedFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cpu_features", lambda: features)
    # The second shape fits no tile, chunk, segment or group, and is none for the matrix unit.
    assert_same_bits(*two_modules((form,), form, (3, 672, 288), dtype), dtype, (1, 3, 16, 200))
    assert_same_bits(*two_modules((form,), form, (3, 581, 77), dtype), dtype, (1, 16))


@pytest.mark.parametrize("names", MIXES, ids=str)
def test_gate_and_up_of_two_formats(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    forms, dtype = (BY_NAME[names[0]], BY_NAME[names[1]]), torch.bfloat16
    for features in SETS:
        monkeypatch.setattr(native, "cpu_features", lambda features=features: features)
        # 72 + 72 rows: the boundary lies within a tile.
        assert_same_bits(*two_modules(forms, forms[1], (3, 288, 72), dtype), dtype, (1, 16, 200))
        assert_same_bits(*two_modules(forms, forms[0], (3, 96, 40), dtype), dtype, (1, 5))


@pytest.mark.parametrize(("features", "form", "dtype"), CASES)
def test_linear_layers(
    features: Features, form: PackedFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "cpu_features", lambda: features)
    for n_in, n_out in ((544, 96), (75, 33)):
        packed = random_packed(form, 1, n_out, n_in)
        bias = random_rows(1, n_out, dtype)[0]
        layer, weight = PackedLinear(packed, bias), packed.unpack(dtype)[0]
        assert layer.falls_back is None
        for n_rows in (1, 3, 16, 200):
            x = random_rows(n_rows, n_in, dtype, seed=1)
            result = layer(x)
            if n_rows <= 16:
                assert torch.equal(result, few_row_linear(x, weight, bias))
            truth = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
            assert (result - truth).abs().max() <= 2**-7 * truth.abs().max()


@pytest.mark.parametrize(("features", "form", "dtype"), CASES)
def test_rows_of_an_embedding(
    features: Features, form: PackedFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "cpu_features", lambda: features)
    for n_in in (544, 75):
        packed = random_packed(form, 1, 33, n_in)
        assert PackedEmbedding.fits(packed, dtype)
        embedding, ids = PackedEmbedding(packed, dtype), torch.tensor([[0, 32, 7], [7, 1, 30]])
        for given in (ids, ids.int(), ids.t().contiguous().t()):
            assert torch.equal(embedding(given), packed.unpack(dtype)[0][ids])
        for wrong in (-1, 33):
            with pytest.raises(IndexError, match=f"token {wrong} of 33"):
                embedding(torch.tensor([3, wrong]))


def test_largest_scales_and_not_a_number() -> None:
    x = torch.eye(64, dtype=torch.bfloat16)
    packed = random_packed(BY_NAME["mxfp8"], 1, 64, 64)
    packed.section("scales").copy_(torch.arange(128, dtype=torch.uint8).view(1, 64, 2) + 126)
    packed.section("codes")[:, ::7, 5] = 0xFF
    packed.section("codes")[:, ::5, 40] = 0x7F
    expected = packed.unpack(torch.bfloat16)[0].T
    expected = torch.where(expected.isinf(), torch.nan, expected)  # times 0 in the same sum
    got = PackedLinear(packed)(x)
    rows = expected.isfinite().all(dim=0)  # a weight row with an infinite weight has no finite sum
    assert rows.sum() > 10
    assert torch.equal(got[:, rows], expected[:, rows])
    assert not got[:, ~rows].isfinite().all(dim=0).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_familys_layout(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny(family, tmp_path), dtype=dtype)
    packed, plain = (
        checkpoint.build_experts(len(checkpoint.layers) - 1, [5, 0, 3, 6, 1], torch.device("cpu")) for _ in range(2)
    )
    generator = torch.Generator().manual_seed(0)
    for parameter, same in zip(packed.parameters(), plain.parameters(), strict=True):
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
        same.copy_(parameter)
    up_name = "gate_up_proj" if plain.has_gate else "up_proj"
    parts: list[tuple[PackedWeights]] = []
    for name, form in ((up_name, BY_NAME["q4_k"]), ("down_proj", BY_NAME["int8 F16 32"])):
        weight = getattr(plain, name)
        n_experts, n_out, n_in = (weight.transpose(1, 2) if plain.is_transposed else weight).shape
        parts.append((random_packed(form, n_experts, n_out, n_in),))
        rows = unpacked(parts[-1], dtype)
        weight.copy_(rows.transpose(1, 2) if plain.is_transposed else rows)
    assert_same_bits(pack_experts(packed, parts[0], parts[1], dtype), plain, dtype, (1, 20))


def test_threads_and_slices_do_not_change_bits() -> None:
    packed, plain = two_modules((BY_NAME["q4_k"], BY_NAME["q6_k"]), BY_NAME["mxfp4"], (4, 512, 384), torch.bfloat16)
    expected, layer = LayerKernels(plain, kernel="tiled"), LayerKernels(packed, kernel="tiled")
    for n_rows in (1, 5, 90):
        some = random_call(n_rows, 512, torch.bfloat16, 2, 4, absent=0.1)
        out, wanted = torch.empty(n_rows, 512), call(expected, *some)
        with threads(2):
            for _ in layer.in_slices(KernelInput(*some, out)):
                pass
        assert torch.equal(out, wanted)
        with threads(8):  # more than there is scratch memory for
            assert torch.equal(call(layer, *some), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_kernel_unpacks(dtype: torch.dtype) -> None:
    packed, plain = two_modules((BY_NAME["mxfp4"], BY_NAME["q4_k"]), BY_NAME["fp8 blocks"], (4, 288, 96), dtype)
    layer = LayerKernels(packed, kernel="grouped")
    assert (layer.n_experts, layer.hidden, layer.dtype) == (4, 288, dtype)
    for n_rows in (1, 40):
        inputs = random_call(n_rows, 288, dtype, 2, 4, absent=0.2)
        assert torch.equal(call(layer, *inputs), grouped_experts(plain, *inputs))


def test_combinations_without_a_kernel_fall_back() -> None:
    odd = PackedFormat("odd", Codes.INT8, Scales.F16, group=48)
    packed, plain = two_modules((odd,), odd, (3, 96, 48), torch.bfloat16)
    layer = LayerKernels(packed)
    assert layer.falls_back == "odd: groups of 48 weights; weights are unpacked in every call"
    inputs = random_call(5, 96, torch.bfloat16, 2, 3)
    assert torch.equal(call(layer, *inputs), grouped_experts(plain, *inputs))
    with pytest.raises(ValueError, match="groups of 48"):
        LayerKernels(packed, kernel="tiled")
    linear = PackedLinear(random_packed(odd, 1, 32, 96))
    assert linear.falls_back == "odd: groups of 48 weights"
    x = random_rows(3, 96, torch.bfloat16)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight.unpack(torch.bfloat16)[0]))


def test_parts_that_do_not_fit_are_refused() -> None:
    form = BY_NAME["mxfp4"]
    parts = random_packed(form, 3, 96, 64), random_packed(form, 3, 96, 96)
    experts = pack_experts(gated_experts(3, 64, 96, torch.bfloat16), parts, parts[:1], torch.bfloat16)
    with pytest.raises(ValueError, match="not parts of one matrix"):
        LayerKernels(experts)
