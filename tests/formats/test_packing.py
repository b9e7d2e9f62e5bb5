"""Weights packed in fewer bits, and turned: as far from the original as the format makes them, in no more memory."""

from __future__ import annotations

import resource

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from moeoffload.formats import Codes, PackedFormat, PackedWeights, Scales
from moeoffload.formats.quantise import FORMATS, quantise

ERRORS = {"int8": 0.006, "fp8": 0.03, "int4": 0.11, "mxfp4": 0.14}
"""The most that normally distributed weights may lose."""


def weights_of(n_out: int, n_in: int) -> torch.Tensor:
    weights = torch.randn(3, n_out, n_in, generator=torch.manual_seed(0)).bfloat16()
    weights[0, 0] = 0
    weights[1] *= 1e-3
    return weights


def quantised(weights: torch.Tensor, name: str) -> tuple[PackedWeights, float]:
    """Packed weights, and the error that `quantise` says they have, which is that of their values."""
    packed, wrong, total = quantise(weights, FORMATS[name])
    exact = weights.float()
    assert wrong == pytest.approx(float((packed.unpack(torch.float32) - exact).square().sum()), rel=1e-4)
    assert total == pytest.approx(float(exact.square().sum()), rel=1e-4)
    return packed, (wrong / total) ** 0.5


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n_out", "n_in"), [(256, 512), (50, 96), (130, 200)])
def test_error_is_that_of_the_format_and_results_repeat(name: str, n_out: int, n_in: int) -> None:
    weights = weights_of(n_out, n_in)
    packed, error = quantised(weights, name)
    assert packed.shape == weights.shape
    assert 0 < error < ERRORS[name]
    strided = weights.transpose(1, 2).contiguous().transpose(1, 2)  # as families store that have (in, out)
    for same in (weights, strided, strided.float()):
        assert torch.equal(quantise(same, FORMATS[name])[0].data, packed.data)
    assert packed.unpack(torch.bfloat16)[0, 0].eq(0).all()


@pytest.mark.parametrize(("name", "kind"), [("int8", GGMLQuantizationType.Q8_0), ("int4", GGMLQuantizationType.Q4_0)])
def test_error_is_no_larger_than_that_of_ggufs_own_quantiser(name: str, kind: GGMLQuantizationType) -> None:
    weights = weights_of(64, 256).float()
    theirs = torch.from_numpy(quants.dequantize(quants.quantize(np.asarray(weights), kind), kind))
    error = float((theirs - weights).square().sum() / weights.square().sum()) ** 0.5
    assert quantised(weights, name)[1] <= 1.02 * error


def test_weights_that_mxfp4_holds_exactly_stay_as_they_are() -> None:
    exact = torch.tensor([0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0] * 8).view(1, 2, 32)
    exact = exact * torch.tensor([2.0**-20, 2.0**9]).view(1, 2, 1)
    packed, error = quantised(exact, "mxfp4")
    assert torch.equal(packed.unpack(torch.float32), exact)
    assert error == 0


def test_mxfp4_rounds_to_the_nearest_of_its_values_and_ties_to_the_even_code() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = torch.cat((middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(8.0))))
    rounded = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    group = torch.zeros(1, 1, 64)
    group[0, 0, :21], group[0, 0, 32:53], group[0, 0, 31::32] = values, -values, 6.0
    expected = torch.zeros(1, 1, 64)
    expected[0, 0, :21], expected[0, 0, 32:53] = torch.tensor(rounded), -torch.tensor(rounded)
    expected[0, 0, 31::32] = 6.0
    assert torch.equal(quantised(group, "mxfp4")[0].unpack(torch.float32), expected)


def test_a_group_far_longer_than_a_row_takes_no_memory_of_its_length() -> None:
    form = PackedFormat("fp8", Codes.FP8, Scales.F32, group=1 << 40, shared_rows=1 << 40)
    packed = PackedWeights.empty(form, 1, 3, 32, torch.device("cpu"))
    packed.data.fill_(0x38)  # 1.0
    assert packed.scales is not None
    packed.scales.fill_(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert torch.equal(packed.unpack(torch.float32), torch.full((1, 3, 32), 2.0))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
