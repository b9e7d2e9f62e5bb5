"""All dense layers of whole models: results stay close, the model stays what it is, and other models are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import tasks
import torch
from conftest import DEMO, local_model
from synthetic import tiny_config
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from moeoffload.kernels import sdpa
from moeoffload.kernels.attention import FEW_QUERIES
from moeoffload.kernels.fast_dense import accelerate_dense

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
    assert sdpa._attention(*arguments, sliding_window=3, position_ids=query)[0].shape == (1, 2, 4, 16)
    for more in (
        {"dropout": 0.1}, {"s_aux": query}, {"softcap": 3.0}, {"position_bias": query},
        {"cache": object()},
    ):  # fmt: skip
        assert sdpa._attention(*arguments, **more) == "theirs"
    assert sdpa._attention(module, query.clone().requires_grad_(), key, key, None) == "theirs"
    assert sdpa._attention(module, query[:, :2], key, key, None) == "theirs"


def test_queries_at_the_beginning_of_a_longer_cache_are_causal() -> None:
    module = small_model("qwen3_moe").model.layers[0].self_attn
    sdpa._modules.add(module)
    for n_queries, n_keys in ((3, 9), (40, 300)):
        query, key = torch.randn(1, 4, n_queries, 16).bfloat16(), torch.randn(1, 2, n_keys, 16).bfloat16()
        arguments = (module, query, key, key, None)
        for causal in (None, False):
            theirs = sdpa_attention_forward(*arguments, is_causal=causal)[0]
            assert torch.allclose(sdpa._attention(*arguments, is_causal=causal)[0], theirs, atol=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_demo_model_answers_the_same(dtype: torch.dtype) -> None:
    model, tokenizer = local_model(DEMO, dtype=dtype), AutoTokenizer.from_pretrained(DEMO)
    tokenizer.padding_side = "left"
    prompts = tokenizer(tasks.prompts(24, seed=3), return_tensors="pt", padding=True)
    options = {"max_new_tokens": 10, "do_sample": False}
    batches = (prompts, {name: value[:1] for name, value in prompts.items()})
    expected = [model.generate(**batch, **options) for batch in batches]
    accelerate_dense(model)
    for batch, tokens in zip(batches, expected, strict=True):
        assert torch.equal(model.generate(**batch, **options), tokens)
