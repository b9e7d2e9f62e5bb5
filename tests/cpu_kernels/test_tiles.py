"""Tiles of packed weights, multiplied as integers or as FP8 where there is no matrix unit."""

from __future__ import annotations

import ctypes

import pytest
import torch
from experts_modules import FORMATS, pack_experts, random_packed, unpacked

from moeoffload import native
from moeoffload.formats.packed import Codes, PackedFormat, PackedWeights
from moeoffload.formats.quantise import FORMATS as FORMATS_AT_LOAD
from moeoffload.formats.quantise import quantise
from moeoffload.formats.tiles import TILE_ROWS, can_tile, rows_of, write_tiles
from moeoffload.kernels import KernelInput, LayerKernels
from moeoffload.kernels.dense import PackedLinear
from moeoffload.native import Features

from .experts import EPSILON, call, gated_experts, instruction_sets, random_call, random_rows, threads

TILED = [form for form in FORMATS if can_tile(form, 16, 256)]
SETS = [some & ~Features.MATRIX_UNIT for some in instruction_sets() if Features.AVX2 in some]
DTYPES = (torch.bfloat16, torch.float16)
EACH_SPLIT = range(5, 41)
"""Numbers of rows that are split into sets of every size that there is, and into one and two turns of sets."""

pytestmark = pytest.mark.skipif(not SETS, reason="this CPU has no AVX2: no integers are multiplied")


def use(features: Features, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cpu_features", lambda: features)


def copy_of(packed: PackedWeights) -> PackedWeights:
    return PackedWeights(packed.format, packed.n_in, packed.data.clone(), packed.scales)


def adds_pairs(form: PackedFormat, dtype: torch.dtype, features: Features) -> bool:
    """Whether pairs of bfloat16 are multiplied, the only products whose sums are rounded differently."""
    pairs = Features.BF16_DOT | Features.INTEGER_DOT | Features.BYTE_LOOKUP
    return form.codes is Codes.FP8 and dtype is torch.bfloat16 and pairs in features


def test_every_integer_format_and_fp8_is_tiled() -> None:
    names = {form.name for form in TILED}
    assert {"int8 F16 32", "int8 zero", "mxfp4", "int4 BF16 128 ZERO", "q4_k", "q5_k", "q6_k", "iq4_xs"} <= names
    assert {"fp8 blocks", "fp8 channels", "mxfp8"} <= names
    assert not any(name.startswith(("nvfp4", "BFLOAT")) for name in names)


@pytest.mark.parametrize("form", TILED, ids=lambda form: form.name)
def test_rows_come_back_and_an_expert_goes_from_rows_to_tiles_and_back(form: PackedFormat) -> None:
    rows, tiles, other = (
        random_packed(form, 3, 48, 768),
        random_packed(form, 3, 48, 768),
        random_packed(form, 3, 48, 768, 1),
    )
    for each in (tiles, other):
        each.lay_tiles()
    assert not torch.equal(tiles.data, rows.data)
    some = torch.tensor([2, 0])
    assert torch.equal(tiles.unpack(torch.float32, some), rows.unpack(torch.float32, some))
    for number in (0, 17, 47):
        assert torch.equal(tiles.row(number, torch.float32), rows.row(number, torch.float32))
    again = tiles.data.clone()
    tiles.lay_tiles()
    assert torch.equal(tiles.data, again)
    expected, others = rows.unpack(torch.float32), other.unpack(torch.float32)
    kept = rows.take(0)
    other.put(2, rows.one(0))
    rows.put(0, other.take(1))
    other.put(0, kept)
    assert torch.equal(other.unpack(torch.float32), torch.stack([expected[0], others[1], expected[0]]))
    assert torch.equal(rows.unpack(torch.float32), torch.stack([others[1], *expected[1:]]))


@pytest.mark.parametrize("form", TILED, ids=lambda form: form.name)
def test_tiles_are_the_same_whichever_instructions_make_them(form: PackedFormat) -> None:
    packed = random_packed(form, 1, 48, 768)
    parts = {name: packed.data[0][:, place] for name, place in form.sections(768).items()}
    tiles, anywhere = torch.empty_like(packed.data[0]), torch.empty_like(packed.data[0])
    write_tiles(form, 768, parts, tiles)
    rows, library = rows_of(form, 768, parts, 48), native.native_library()
    assert library is not None
    sizes = ctypes.c_int64(TILE_ROWS * tiles.shape[1]), ctypes.c_int64(3)
    library.moe_make_tiles_anywhere(ctypes.byref(rows), ctypes.c_void_p(anywhere.data_ptr()), *sizes)
    assert torch.equal(tiles, anywhere)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", TILED, ids=lambda form: form.name)
def test_linear_layers(form: PackedFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_packed(form, 1, 112, 768)
    weight, bias = rows.unpack(torch.float32)[0], random_rows(1, 112, dtype)[0]
    results = []
    for features in SETS:
        use(features, monkeypatch)
        packed = copy_of(rows)
        layer = PackedLinear(packed, bias)
        x = random_rows(200, 768, dtype, seed=1)
        result = layer(x)
        assert packed.in_tiles
        exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        assert (result - exact).abs().max() <= EPSILON[dtype] * exact.abs().max()
        for n_rows in (1, 2, 3, 4, *EACH_SPLIT):
            assert torch.equal(layer(x[5 : 5 + n_rows]), result[5 : 5 + n_rows]), n_rows
        if not adds_pairs(form, dtype, features):
            results.append(result)
    assert all(torch.equal(each, results[0]) for each in results), "bits depend on the instruction set"


@pytest.mark.parametrize("features", SETS, ids=str)
def test_rows_that_end_within_what_shares_a_scale(features: Features, monkeypatch: pytest.MonkeyPatch) -> None:
    use(features, monkeypatch)
    forms = [form for form in TILED if can_tile(form, 16, 288)]
    assert len(forms) > 5
    for form in forms:
        for n_in in (288, 544):
            packed = random_packed(form, 1, 48, n_in)
            weight, x = packed.unpack(torch.float64)[0], random_rows(EACH_SPLIT[-1], n_in, torch.bfloat16)
            x[:, :256] *= 2.0**-20
            exact, layer = x.double() @ weight.T, PackedLinear(packed)
            alone = torch.cat([layer(row) for row in x.split(1)])
            assert (alone - exact).abs().max() <= EPSILON[x.dtype] * exact.abs().max(), form.name
            for n_rows in EACH_SPLIT:
                assert torch.equal(layer(x[:n_rows]), alone[:n_rows]), (form.name, n_in, n_rows)


@pytest.mark.parametrize("form", TILED, ids=lambda form: form.name)
def test_experts(form: PackedFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16
    up, down = random_packed(form, 4, 2 * 256, 768), random_packed(form, 4, 768, 256, 7)
    plain = gated_experts(4, 768, 256, torch.float32)
    plain.gate_up_proj.copy_(unpacked((up,), torch.float32))
    plain.down_proj.copy_(unpacked((down,), torch.float32))
    expected = LayerKernels(plain, kernel="tiled")
    for features in SETS:
        use(features, monkeypatch)
        layer = LayerKernels(
            pack_experts(gated_experts(4, 768, 256, dtype), (copy_of(up),), (copy_of(down),), dtype), kernel="tiled"
        )
        for n_rows in (1, 3, 16, 200):
            rows, slots, weights = random_call(n_rows, 768, dtype, 2, 4, seed=n_rows, absent=0.1)
            result, wanted = call(layer, rows, slots, weights), call(expected, rows.float(), slots, weights)
            assert (result - wanted).norm() <= 2**-7 * wanted.norm(), n_rows
            for row in range(0, n_rows, 1 + n_rows // 5):
                one = slice(row, row + 1)
                assert torch.equal(call(layer, rows[one], slots[one], weights[one]), result[one]), (n_rows, row)


@pytest.mark.parametrize("names", [("q4_k", "q6_k", "mxfp4"), ("fp8 channels", "mxfp8", "fp8 blocks")], ids=str)
def test_threads_and_slices_do_not_change_bits(names: tuple[str, str, str]) -> None:
    gate, up, down = (next(form for form in TILED if form.name == name) for name in names)
    parts = random_packed(gate, 4, 384, 512), random_packed(up, 4, 384, 512)
    last = random_packed(down, 4, 512, 384)
    experts = pack_experts(gated_experts(4, 512, 384, torch.bfloat16), parts, (last,), torch.bfloat16)
    plain = gated_experts(4, 512, 384, torch.float32)
    plain.gate_up_proj.copy_(unpacked(parts, torch.float32))
    plain.down_proj.copy_(unpacked((last,), torch.float32))
    layer = LayerKernels(experts, kernel="tiled")
    for n_rows in (1, 5, 90):
        some = random_call(n_rows, 512, torch.bfloat16, 2, 4, absent=0.1)
        whole, wanted = call(layer, *some), call(LayerKernels(plain, kernel="tiled"), some[0].float(), *some[1:])
        assert (whole - wanted).norm() <= 2**-7 * wanted.norm(), n_rows
        with threads(2):
            assert torch.equal(call(layer, *some), whole)
            out = torch.empty(n_rows, 512)
            for _ in layer.in_slices(KernelInput(*some, out)):
                pass
            assert torch.equal(out, whole)


@pytest.mark.parametrize("features", SETS, ids=str)
def test_numbers_at_the_ends_of_the_range(features: Features, monkeypatch: pytest.MonkeyPatch) -> None:
    use(features, monkeypatch)
    form = next(form for form in TILED if form.name == "int8 F32 32")
    packed = random_packed(form, 1, 16, 256)
    layer, weight = PackedLinear(packed), packed.unpack(torch.float64)[0]
    x = random_rows(6, 256, torch.bfloat16)
    x[1, 40] = torch.nan
    x[2, 3] = torch.inf
    x[3] *= 2.0**-100
    x[4] = -255 / 128 * 2.0**60
    x[5] = 0
    result = layer(x)
    assert not result[1:3].isfinite().any()
    exact = x.double() @ weight.T
    for row in (0, 4):
        assert (result[row] - exact[row]).abs().max() <= 2**-8 * exact[row].abs().max()
    assert result[3].abs().max() < 2.0**-90
    assert not result[5].any()


@pytest.mark.parametrize("features", SETS, ids=str)
def test_every_code_of_fp8(features: Features, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros, subnormal numbers and NaN are what torch takes them for."""
    use(features, monkeypatch)
    form = next(form for form in TILED if form.name == "fp8 channels")
    packed = random_packed(form, 1, 256, 32)
    packed.section("codes").copy_(torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 32))
    x = torch.zeros(12, 32, dtype=torch.bfloat16)
    for place in range(12):
        x[place, 8 + place] = 1.0
    expected = packed.unpack(torch.float32)[0, :, 0]
    assert expected.isnan().sum() == 2
    for result in (*PackedLinear(packed)(x), *PackedLinear(packed)(x[:4])):
        torch.testing.assert_close(result.float(), expected, rtol=2**-8, atol=1e-38, equal_nan=True)


def test_rows_of_another_dtype_are_computed_beside_tiles_and_float32_alone_makes_none() -> None:
    for form in TILED:
        packed = random_packed(form, 1, 32, 256)
        weight, layer = packed.unpack(torch.float64)[0], PackedLinear(packed)
        x = random_rows(2, 256, torch.float32)
        for dtype, tolerance, in_tiles in (
            (torch.float32, 1e-5, False),
            (torch.bfloat16, 2**-7, True),
            (torch.float32, 1e-5, True),
        ):
            exact = x.to(dtype).double() @ weight.T
            assert (layer(x.to(dtype)) - exact).abs().max() <= tolerance * exact.abs().max()
            assert packed.in_tiles == in_tiles


def test_wide_rows_stay_exact_beside_an_outlier() -> None:
    """An activation a thousand times the others does not cost those outside of its block anything."""
    form = next(form for form in TILED if form.name == "int4 F16 128 NONE")
    packed = random_packed(form, 1, 32, 512)
    weight = packed.unpack(torch.float64)[0]
    x = random_rows(1, 512, torch.bfloat16)
    x[0, 7] = 1000.0
    result = PackedLinear(packed)(x).double()
    exact = x.double() @ weight.T
    assert (result - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_lone_activation_just_below_a_power_of_two_is_exact(name: str) -> None:
    packed = quantise(torch.eye(16, 256, dtype=torch.float16)[None], FORMATS_AT_LOAD[name])[0]
    x = torch.zeros(1, 256, dtype=torch.float16)
    x[0, 0] = 1.9990234375
    exact = x.double() @ packed.unpack(torch.float64)[0].T
    assert (PackedLinear(packed)(x).double() - exact).abs().max() <= 2**-11 * exact.max()
