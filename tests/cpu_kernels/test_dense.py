"""Dense layers, norms and attention of whole models: torch's results but for the order of summation."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from conftest import DEMO, local_model
from models import answers, demo_inputs
from synthetic import tiny_config
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from moeoffload import native
from moeoffload.kernels import sdpa
from moeoffload.kernels.attention import FEW_QUERIES
from moeoffload.kernels.dense import MAX_ROWS, FewRowLinear, accelerate_linears, product_if_few
from moeoffload.kernels.fast_dense import accelerate_dense
from moeoffload.kernels.norm import FusedNorm, NormKind, accelerate_norms, rms_norm
from moeoffload.native import Features

from .experts import DTYPES, EPSILON, few_row_linear, instruction_sets, threads


def _linear(n_in: int, n_out: int, dtype: torch.dtype, *, bias: bool) -> nn.Linear:
    torch.manual_seed(n_in + n_out)
    return nn.Linear(n_in, n_out, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("features", instruction_sets(), ids=str)
@pytest.mark.parametrize("shape", [(64, 32), (2048, 96), (130, 77), (7, 5), (1, 1), (4096, 4)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_is_exact_but_for_one_rounding(
    dtype: torch.dtype, bias: bool, shape: tuple[int, int], features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "cpu_features", lambda: features)
    linear = _linear(*shape, dtype, bias=bias)
    for n_rows in (1, 2, 3, 6, 7, MAX_ROWS):
        x = torch.randn(n_rows, shape[0]).to(dtype)
        truth = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
        ours = few_row_linear(x, linear.weight, linear.bias)
        assert ours.dtype == dtype
        assert ((ours - truth).abs() <= EPSILON[dtype] * truth.abs() + 2**-19).all()
        for row in range(n_rows):
            assert torch.equal(few_row_linear(x[row], linear.weight, linear.bias), ours[row])
        x[-1, -1] = torch.nan if n_rows % 2 else torch.inf
        spoilt = few_row_linear(x, linear.weight, linear.bias)
        assert not spoilt[-1].isfinite().any()
        assert torch.equal(spoilt[:-1], ours[:-1])


def test_shapes_of_the_input_are_kept() -> None:
    linear = _linear(64, 32, torch.bfloat16, bias=True)
    for shape in ((64,), (1, 64), (1, 1, 64), (2, 3, 64), (0, 64), (2, 0, 64)):
        assert few_row_linear(torch.zeros(shape).bfloat16(), linear.weight, linear.bias).shape == (*shape[:-1], 32)
    x = torch.randn(4, 3, 64).bfloat16().transpose(0, 1)
    assert torch.equal(few_row_linear(x, linear.weight), few_row_linear(x.contiguous(), linear.weight))


def test_what_does_not_fit_is_left_to_torch() -> None:
    weight = torch.zeros(32, 64).bfloat16()
    for x in (torch.zeros(MAX_ROWS + 1, 64).bfloat16(), torch.zeros(1, 32).bfloat16(), torch.zeros(1, 64)):
        assert product_if_few(x, weight) is None


@pytest.mark.parametrize("n_out", [1030, 1040])
@pytest.mark.parametrize("n_rows", [1, 3, MAX_ROWS])
def test_two_threads_give_the_same_bits(n_rows: int, n_out: int) -> None:
    linear = _linear(1024, n_out, torch.bfloat16, bias=True)
    x = torch.randn(n_rows, 1024).bfloat16()
    alone = few_row_linear(x, linear.weight, linear.bias)
    with threads(2):
        assert all(torch.equal(few_row_linear(x, linear.weight, linear.bias), alone) for _ in range(20))


def test_hooks_are_called_and_gradients_many_rows_and_other_dtypes_go_to_torch() -> None:
    linear = nn.Linear(64, 32, dtype=torch.bfloat16)
    accelerate_linears(linear)
    assert type(linear) is FewRowLinear
    assert list(linear.state_dict()) == ["weight", "bias"]
    x = torch.randn(MAX_ROWS + 1, 64).bfloat16()
    seen = []
    linear.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    out = linear(x[:1])
    assert seen == [(1, 32)]
    assert out.requires_grad
    out.sum().backward()
    assert linear.weight.grad is not None
    with torch.no_grad():
        assert torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))
        with pytest.raises(RuntimeError):
            linear(x[:1].float())
        twin = copy.deepcopy(linear)
        for parameter in twin.parameters():
            parameter.zero_()
        assert not twin(x[:1]).any()


NORMS = {
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
@pytest.mark.parametrize("name", NORMS)
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
        assert module.fused_kind is NORMS[name]
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


# Families by their tiny configs, with a window shorter than the prompt, and values narrower than keys.
FAMILIES: dict[str, dict[str, int]] = {
    "qwen3_moe": {}, "qwen2_moe": {}, "mixtral": {"sliding_window": 6}, "gpt_oss": {},
    "deepseek_v3": {"v_head_dim": 12}, "olmoe": {}, "qwen3_5_moe": {},
}  # fmt: skip


def small_model(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A random model of a family, without gradients."""
    torch.manual_seed(0)
    config = tiny_config(family)
    for name, value in FAMILIES[family].items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def state(model: nn.Module) -> list[Any]:
    """What tells whether anything was changed."""
    return [
        [(name, type(module), dict(module.__dict__)) for name, module in model.named_modules()],
        [(name, type(parameter), id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()],
        AttentionInterface()["sdpa"],
        model.config.to_dict(),  # type: ignore[operator, union-attr]
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_close_to_those_before(family: str, dtype: torch.dtype) -> None:
    model = small_model(family, dtype)
    ids = torch.randint(1, 320, (2, 40), generator=torch.manual_seed(3))
    seen = torch.ones_like(ids)
    seen[0, :5] = 0

    def logits() -> list[torch.Tensor]:
        cache = DynamicCache(config=model.config)
        parts = []
        for start, end in ((0, 20), (20, 21), (21, 25), (25, 40)):
            out = model(ids[:, start:end], attention_mask=seen[:, :end], past_key_values=cache, use_cache=True)
            parts.append(out.logits[seen[:, start:end] > 0].float())
        parts.append(model(ids[1:, :1]).logits)
        return parts

    expected = logits()
    accelerate_dense(model)
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()] or family == "deepseek_v3"
    close = {torch.bfloat16: 0.05, torch.float32: 1e-4}[dtype]
    for ours, theirs in zip(logits(), expected, strict=True):
        # A router may choose another expert where two are alike.
        assert ((ours - theirs).abs().amax(-1) < close).float().mean() >= 0.9


def test_only_this_model_and_only_calls_that_get_faster_are_concerned(monkeypatch: pytest.MonkeyPatch) -> None:
    # Many queries are only for bfloat16.
    ours, other = (small_model("qwen3_moe", torch.float16) for _ in range(2))
    calls: list[int] = []
    real = sdpa.cpu_attention

    def counting(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(query.shape[2])
        return real(query, *args, **kwargs)

    monkeypatch.setattr(sdpa, "cpu_attention", counting)
    accelerate_dense(ours)
    accelerate_dense(ours)
    ids = torch.ones(1, FEW_QUERIES + 1, dtype=torch.long)
    other(ids[:, :1])
    ours(ids)
    assert calls == []
    ours(ids[:, :1])
    ours(ids[:, 1:])
    assert calls == [1, 1, FEW_QUERIES, FEW_QUERIES]


def test_calls_that_mean_more_are_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = small_model("qwen3_moe").model.layers[0].self_attn
    monkeypatch.setattr(sdpa, "_modules", {module})
    monkeypatch.setattr(sdpa, "sdpa_attention_forward", lambda *args, **kwargs: "theirs")
    query, key = torch.randn(1, 4, 2, 16).bfloat16(), torch.randn(1, 2, 9, 16).bfloat16()
    arguments = (module, query, key, key, None)
    assert sdpa.attention(*arguments, sliding_window=3, position_ids=query)[0].shape == (1, 2, 4, 16)
    for more in (
        {"dropout": 0.1}, {"s_aux": query}, {"softcap": 3.0}, {"position_bias": query},
        {"cache": object()},
    ):  # fmt: skip
        assert sdpa.attention(*arguments, **more) == "theirs"
    assert sdpa.attention(module, query.clone().requires_grad_(), key, key, None) == "theirs"
    assert sdpa.attention(module, query[:, :2], key, key, None) == "theirs"


def test_queries_at_the_beginning_of_a_longer_cache_are_causal() -> None:
    module = small_model("qwen3_moe").model.layers[0].self_attn
    sdpa._modules.add(module)
    for n_queries, n_keys in ((3, 9), (40, 300)):
        query, key = torch.randn(1, 4, n_queries, 16).bfloat16(), torch.randn(1, 2, n_keys, 16).bfloat16()
        arguments = (module, query, key, key, None)
        for causal in (None, False):
            theirs = sdpa_attention_forward(*arguments, is_causal=causal)[0]
            assert torch.allclose(sdpa.attention(*arguments, is_causal=causal)[0], theirs, atol=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_demo_model_answers_the_same(dtype: torch.dtype) -> None:
    model = local_model(DEMO, dtype=dtype)
    batches = (demo_inputs(24), {name: value[:1] for name, value in demo_inputs(24).items()})
    expected = [answers(model, batch) for batch in batches]
    accelerate_dense(model)
    assert [answers(model, batch) for batch in batches] == expected
