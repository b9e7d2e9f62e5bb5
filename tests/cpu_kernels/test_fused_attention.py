"""Attention of few rows in one call: the bits of the separate layers, in every family that has the usual form."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from synthetic import TINY_FAMILIES, tiny_config
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from moeoffload.formats.quantise import FORMATS, quantise
from moeoffload.kernels import calls, fast_dense
from moeoffload.kernels.dense import PackedLinear
from moeoffload.kernels.fused_attention import AttentionLayers, FusedAttention

pytestmark = pytest.mark.skipif(calls.library() is None, reason="the C library was not built")

USUAL = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "granitemoe", "dots1"]


def both(
    family: Any, dtype: torch.dtype = torch.bfloat16, change: Callable[[Any], None] = lambda model: None
) -> tuple[Any, Any]:
    """The same random model of a family or config twice, accelerated; the second computes projections separately."""
    torch.manual_seed(0)
    config = tiny_config(family) if isinstance(family, str) else family
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.add_(0.2 * torch.randn_like(parameter))
    change(model)
    models = copy.deepcopy(model), model
    fast_dense.accelerate_dense(models[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_dense, "fuse_attention", lambda model: None)
        fast_dense.accelerate_dense(models[1])
    return models


def attentions(model: nn.Module) -> list[FusedAttention]:
    return [module for module in model.modules() if isinstance(module, FusedAttention)]


def are_fused(model: nn.Module) -> bool:
    """Whether all attention modules were computed in one call."""
    return bool(attentions(model)) and all(isinstance(each.fused_layers, AttentionLayers) for each in attentions(model))


@torch.no_grad()
def logits(model: Any, batch: int = 2) -> list[torch.Tensor]:
    """Those of a padded batch: few rows, many, one each, and a few more."""
    ids = torch.randint(1, 320, (batch, 40), generator=torch.manual_seed(3))
    seen = torch.ones_like(ids)
    seen[0, :5] = 0
    cache = DynamicCache(config=model.config)
    parts = []
    for start, end in ((0, 7), (7, 20), (20, 21), (21, 25)):
        out = model(ids[:, start:end], attention_mask=seen[:, :end], past_key_values=cache, use_cache=True)
        parts.append(out.logits[seen[:, start:end] > 0])
    return [*parts, model(ids[1:, :1]).logits]


@torch.no_grad()
def decoded(model: Any, batch: int) -> list[torch.Tensor]:
    """Logits of single tokens after prompts without padding; meanwhile the cache is cut, reordered and grows."""
    ids = torch.randint(1, 320, (batch, 400), generator=torch.manual_seed(4))
    cache = DynamicCache(config=model.config)
    parts = [model(ids[:, :5], past_key_values=cache, use_cache=True).logits]

    def decode(n: int) -> None:
        for at in range(n):
            parts.append(model(ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits)

    decode(3)
    cache.crop(-2)
    decode(2)
    cache.reorder_cache(torch.arange(batch).flip(0))
    decode(2)
    parts.append(model(ids[:, 30:300], past_key_values=cache, use_cache=True).logits[:, -1:])
    decode(40)
    return parts


def assert_same(ours: Any, theirs: Any) -> None:
    for mine, their in zip(logits(ours), logits(theirs), strict=True):
        assert torch.equal(mine, their)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", USUAL)
def test_bits_are_those_of_the_separate_layers(family: str, dtype: torch.dtype) -> None:
    ours, theirs = both(family, dtype)
    assert_same(ours, theirs)
    assert are_fused(ours)


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe"])
def test_a_token_is_one_call_for_each_layer(family: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = both(family)
    n_calls = 0
    attend = AttentionLayers.attend

    def counting(*args: Any) -> torch.Tensor | None:
        nonlocal n_calls
        n_calls += 1
        out = attend(*args)
        assert out is not None
        return out

    monkeypatch.setattr(AttentionLayers, "attend", counting)
    for mine, their in zip(decoded(ours, batch), decoded(theirs, batch), strict=True):
        assert torch.equal(mine, their)
    assert n_calls == 47 * len(ours.model.layers)


@pytest.mark.parametrize("kind", ["static", "sliding", "wider", "float32"])
def test_other_caches_are_used_as_before(kind: str) -> None:
    """A sliding window; a cache made in advance; one of more sequences or of another dtype raises what it raised."""

    def window(model: Any) -> None:
        model.config.sliding_window = 6

    ours, theirs = both("mixtral", change=window if kind == "sliding" else lambda model: None)
    if kind in ("static", "sliding"):
        options = {"cache_implementation": "static"} if kind == "static" else {}
        ids = torch.randint(1, 320, (1, 9), generator=torch.manual_seed(5))
        answers = [
            model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, **options)
            for model in (ours, theirs)
        ]
        assert torch.equal(*answers)
        return
    for model in (ours, theirs):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.ones(2 if kind == "wider" else 1, 3, dtype=torch.long), past_key_values=cache, use_cache=True)
            if kind == "float32":
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys.float(), layer.values.float()
            with pytest.raises((RuntimeError, ValueError)):
                model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("packed", ["int8", "int4", "fp8"])
def test_packed_layers_and_several_threads(packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(model: Any) -> None:
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and "_proj" in name:
                model.set_submodule(name, PackedLinear(quantise(module.weight[None], FORMATS[packed])[0], module.bias))

    ours, theirs = both("qwen3_moe", change=pack)
    monkeypatch.setattr("moeoffload.kernels.fused_attention.threads_for", lambda n_bytes: 2)
    assert_same(ours, theirs)
    for mine, their in zip(decoded(ours, 2), decoded(theirs, 2), strict=True):
        assert torch.equal(mine, their)
    assert are_fused(ours)


@pytest.mark.parametrize("family", [*sorted(set(TINY_FAMILIES) - set(USUAL)), "float32"])
def test_others_are_computed_as_before(family: str) -> None:
    ours, theirs = both("mixtral", torch.float32) if family == "float32" else both(family)
    assert_same(ours, theirs)


@pytest.mark.parametrize("impl", ["eager", "sdpa"])
def test_each_attention_function(impl: str) -> None:
    ours, theirs = both("qwen3_moe")
    for model in (ours, theirs):
        model.set_attn_implementation(impl)
    assert_same(ours, theirs)
    assert are_fused(ours) == (impl == "sdpa")


def test_an_attention_that_computes_otherwise_is_left_alone() -> None:
    def doubled(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.__class__ = _Doubled

    ours, theirs = both("qwen3_moe", change=doubled)
    assert_same(ours, theirs)
    assert [each.fused_layers for each in attentions(ours)] == [False] * len(ours.model.layers)


class _Doubled(Qwen3MoeAttention):
    def forward(
        self,
        hidden_states: Any,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        out, weights = super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        return 2 * out, weights


def test_whatever_is_done_to_the_layers_counts() -> None:
    ours, theirs = both("qwen2_moe")
    assert_same(ours, theirs)
    seen: list[int] = []

    def tripled(module: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return 3 * out

    handles = []
    for model in (ours, theirs):
        attention = model.model.layers[0].self_attn
        attention.q_proj.weight.mul_(1.5)
        attention.k_proj.weight.data = attention.k_proj.weight.data.flip(0)
        attention.v_proj.bias.data = attention.v_proj.bias.data + 1
        handles.append(attention.v_proj.register_forward_hook(tripled))
    assert_same(ours, theirs)
    assert len(seen) == 10
    for handle in handles:
        handle.remove()
    assert_same(ours, theirs)
    assert len(seen) == 10
    for model in (ours, theirs):
        model.model.layers[1].self_attn.k_proj = nn.Sequential(model.model.layers[1].self_attn.k_proj, nn.Tanh())
    assert_same(ours, theirs)
    assert_same(copy.deepcopy(ours), copy.deepcopy(theirs))
    assert isinstance(attentions(ours)[0].fused_layers, AttentionLayers)


def test_a_first_token_at_position_0_which_no_rotary_embedding_turns_misleads_nobody() -> None:
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    config = CONFIG_MAPPING["cohere2_moe"](**sizes, pad_token_id=0)  # turns neighbours together, and some layers none
    ours, theirs = both(config)
    ids = torch.randint(5, 90, (1, 12), generator=torch.manual_seed(1))
    with torch.inference_mode():
        ours(ids[:, :1])
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
