"""Weights packed in fewer bits: as far from the original as the format makes them, and the same every time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from moeoffload.formats import PackedWeights
from moeoffload.formats.quantise import FORMATS, quantise, squared_errors

ERRORS = {"int8": 0.006, "fp8": 0.03, "int4": 0.11, "mxfp4": 0.14}
"""The most that normally distributed weights may lose."""


def weights_of(n_out: int, n_in: int) -> torch.Tensor:
    weights = torch.randn(3, n_out, n_in, generator=torch.manual_seed(0)).bfloat16()
    weights[0, 0] = 0
    weights[1] *= 1e-3
    return weights


def error_of(weights: torch.Tensor, packed: PackedWeights) -> float:
    wrong, total = squared_errors(weights, packed)
    return (wrong / total) ** 0.5


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n_out", "n_in"), [(256, 512), (50, 96), (130, 200)])
def test_error_is_that_of_the_format_and_results_repeat(name: str, n_out: int, n_in: int) -> None:
    weights = weights_of(n_out, n_in)
    packed = quantise(weights, FORMATS[name])
    assert packed.shape == weights.shape
    assert 0 < error_of(weights, packed) < ERRORS[name]
    again = quantise(weights, FORMATS[name])
    assert torch.equal(again.data, packed.data)
    assert packed.unpack(torch.bfloat16)[0, 0].eq(0).all()


@pytest.mark.parametrize(("name", "kind"), [("int8", GGMLQuantizationType.Q8_0), ("int4", GGMLQuantizationType.Q4_0)])
def test_error_is_no_larger_than_that_of_ggufs_own_quantiser(name: str, kind: GGMLQuantizationType) -> None:
    weights = weights_of(64, 256).float()
    theirs = torch.from_numpy(quants.dequantize(quants.quantize(np.asarray(weights), kind), kind))
    error = float((theirs - weights).square().sum() / weights.square().sum()) ** 0.5
    assert error_of(weights, quantise(weights, FORMATS[name])) <= 1.02 * error


def test_weights_that_mxfp4_holds_exactly_stay_as_they_are() -> None:
    exact = torch.tensor([0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0] * 8).view(1, 2, 32)
    exact = exact * torch.tensor([2.0**-20, 2.0**9]).view(1, 2, 1)
    assert torch.equal(quantise(exact, FORMATS["mxfp4"]).unpack(torch.float32), exact)
