"""Packing GGUF's blocks keeps every number: unpacked they are what the gguf package unpacks them to, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from moeoffload.formats.gguf import BLOCK_TYPES, split_rows
from moeoffload.formats.packed import PackedWeights

CPU = torch.device("cpu")
SHAPE = (3, 5, 512)
N_WEIGHTS = {name: GGML_QUANT_SIZES[GGMLQuantizationType[name]][0] for name in BLOCK_TYPES}


def random_blocks(name: str, seed: int) -> np.ndarray:
    """(3, 5, bytes of 512 weights): every bit is random but for the float16 factors, which are finite."""
    kind, random = BLOCK_TYPES[name], np.random.default_rng(seed)
    blocks = random.integers(0, 256, (*SHAPE[:2], SHAPE[2] // N_WEIGHTS[name], kind.n_bytes), dtype=np.uint8)
    factors = random.standard_normal((*blocks.shape[:3], 2)).astype(np.float16).view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = random.integers(0, 252, blocks.shape[:3])  # larger ones overflow, 255 is no number
    elif name == "Q6_K":
        blocks[..., -2:] = factors[..., :2]
    else:
        n_factors = 4 if name in ("Q4_K", "Q5_K") else 2
        blocks[..., :n_factors] = factors[..., :n_factors]
    return blocks.reshape(*SHAPE[:2], -1)


def packed(raw: np.ndarray, name: str) -> PackedWeights:
    kind = BLOCK_TYPES[name]
    weights = PackedWeights.empty(kind.format, *SHAPE, CPU)
    weights.data.fill_(0xAA)
    for expert, rows in enumerate(torch.from_numpy(raw.copy())):
        for section, values in split_rows(rows, kind).items():
            weights.section(section)[expert] = values
    return weights


def reference(raw: np.ndarray, name: str) -> torch.Tensor:
    return torch.from_numpy(dequantize(raw, GGMLQuantizationType[name]).copy()).reshape(SHAPE)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_have_the_size_of_ggml(name: str) -> None:
    assert BLOCK_TYPES[name].n_bytes == GGML_QUANT_SIZES[GGMLQuantizationType[name]][1]


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("seed", range(3))
def test_random_blocks_unpack_to_the_bits_of_the_reference(name: str, seed: int) -> None:
    raw = random_blocks(name, seed)
    weights, wanted = packed(raw, name), reference(raw, name)
    assert wanted.isfinite().all()
    assert wanted.unique().numel() > 100
    assert torch.equal(weights.unpack(torch.float32).view(torch.int32), wanted.view(torch.int32))
    assert torch.equal(weights.unpack(torch.bfloat16), wanted.bfloat16())


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_packed_weights_take_the_room_of_the_file(name: str) -> None:
    raw = random_blocks(name, 0)
    # Q5_0 has a zero point in each block that its format leaves unsaid.
    assert raw.nbytes <= packed(raw, name).nbytes <= (1.05 if name == "Q5_0" else 1.03) * raw.nbytes


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_many_rows_are_split_as_a_few_are(name: str) -> None:
    rows = torch.from_numpy(random_blocks(name, 5)).reshape(15, -1)
    many = rows.repeat(300, 1)
    few, all_of_them = (split_rows(each, BLOCK_TYPES[name]) for each in (rows, many))
    for section, values in few.items():
        assert torch.equal(all_of_them[section], values.repeat(300, 1))


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("n_blocks", [1, 3])
def test_the_library_and_torch_make_the_same_sections(
    name: str, n_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = BLOCK_TYPES[name]
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 256, (7, n_blocks * kind.n_bytes), dtype=torch.uint8, generator=generator)
    by_library = split_rows(rows, kind)
    monkeypatch.setattr("moeoffload.formats.conversion._library", lambda: None)
    by_torch = split_rows(rows, kind)
    sizes = {each: place.stop - place.start for each, place in kind.format.sections(n_blocks * N_WEIGHTS[name]).items()}
    assert {each: values.shape for each, values in by_torch.items()} == {each: (7, sizes[each]) for each in sizes}
    assert by_library.keys() == by_torch.keys()
    for section, values in by_torch.items():
        assert torch.equal(by_library[section], values), section
