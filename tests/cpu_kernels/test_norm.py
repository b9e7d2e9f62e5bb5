"""Fused norms: the results of any family's own module, taken only where they are, and taken back."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from moeoffload import native
from moeoffload.kernels.norm import FusedNorm, NormKind, accelerate_norms, rms_norm
from moeoffload.native import Features

from .experts import instruction_sets, threads

FAMILIES = {
    "qwen3_moe.Qwen3MoeRMSNorm": NormKind.ROUNDED,
    "deepseek_v3.DeepseekV3RMSNorm": NormKind.ROUNDED,
    "llama4.Llama4TextRMSNorm": NormKind.ROUNDED,
    "olmoe.OlmoeRMSNorm": NormKind.ROUNDED,
    "gpt_oss.GptOssRMSNorm": NormKind.WEIGHTED,
    "qwen3_next.Qwen3NextRMSNorm": NormKind.SHIFTED,
    "gemma2.Gemma2RMSNorm": NormKind.SHIFTED,
}


def family_norm(name: str, dim: int, dtype: torch.dtype) -> Any:
    """A norm of a family with a random weight."""
    family, cls = name.split(".")
    module = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), cls)(dim)
    torch.manual_seed(dim)
    with torch.no_grad():
        module.weight.copy_(torch.randn(dim))
    return module.to(dtype).requires_grad_(False)


def ulps(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Units in the last place between two 16-bit tensors, of equal signs."""
    return (ours.view(torch.int16).int() - theirs.contiguous().view(torch.int16).int()).abs()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("features", instruction_sets(), ids=str)
def test_a_familys_norm_is_recognised_and_gives_its_results(
    name: str, dtype: torch.dtype, features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "cpu_features", lambda: features)
    for dim in (16, 77, 128, 2048):
        module = family_norm(name, dim, dtype)
        x = (torch.randn(2, 3, 5, dim) * 3).to(dtype)
        inputs = (x, x[:1, :1], x.transpose(1, 2), x[0, 0, 0], x[:0], x * 1e-4)
        expected = [module(each) for each in inputs]
        accelerate_norms(module)
        assert isinstance(module, FusedNorm)
        assert module.fused_kind is FAMILIES[name]
        for each, theirs in zip(inputs, expected, strict=True):
            ours = module(each)
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            apart = ulps(ours, theirs)
            assert apart.numel() == 0 or apart.max() <= 2
            assert apart.numel() == 0 or (apart != 0).float().mean() < 0.02


@pytest.mark.parametrize("kind", list(NormKind))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_do_not_change_each_other(dtype: torch.dtype, kind: NormKind) -> None:
    x, weight = torch.randn(40, 100).to(dtype), torch.randn(100).to(dtype)
    together = rms_norm(x, weight, 1e-6, kind)
    for row in range(40):
        assert torch.equal(rms_norm(x[row], weight, 1e-6, kind), together[row])
    x[3, 7] = torch.nan
    bad = rms_norm(x, weight, 1e-6, kind)
    assert not bad[3].isfinite().any()
    assert torch.equal(bad[4:], together[4:])
    with threads(2):
        assert torch.equal(
            rms_norm(together.repeat(1000, 1), weight, 1e-6, kind)[-40:], rms_norm(together, weight, 1e-6, kind)
        )


class OddRMSNorm(nn.Module):
    """Has all the looks of a norm, and computes something else."""

    def __init__(self, power: float = 1.0, extra: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        self.eps = 1e-6
        self.power, self.extra = power, extra

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        result = (normed * self.weight.float() ** self.power).to(x.dtype)
        return result if gate is None else result * gate


def test_another_computation_is_left_alone() -> None:
    module = OddRMSNorm(power=2.0)
    accelerate_norms(module)
    assert type(module) is OddRMSNorm


def test_what_does_not_apply_goes_to_the_module_itself() -> None:
    module = OddRMSNorm()
    x = torch.randn(4, 64).bfloat16()
    plain, gated, wide = module(x), module(x, x), module(x.float())
    accelerate_norms(module)
    assert isinstance(module, FusedNorm)
    assert module(x).requires_grad
    with torch.no_grad():
        assert ulps(module(x), plain).max() <= 1
        assert torch.equal(module(x, x), gated)
        assert torch.equal(module(x, gate=x), gated)
        assert torch.equal(module(x.float()), wide)
        module.weight.zero_()
        assert not module(x).any()
        module.float()
        assert module(x).dtype == torch.bfloat16
    assert list(module.state_dict()) == ["weight"]


def test_sizes_must_match() -> None:
    x = torch.zeros(2, 8).bfloat16()
    for weight in (torch.zeros(4).bfloat16(), torch.zeros(8)):
        with pytest.raises(ValueError, match="weight"):
            rms_norm(x, weight, 1e-6, NormKind.ROUNDED)
