"""The growing cache: the bits and the behaviour of transformers' own, without copying the past at every step."""

from __future__ import annotations

from typing import Any

import pytest
import tasks
import torch
from conftest import DEMO, local_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from moeoffload.host.kv_cache import GrowingLayer, generation_cache, growing_cache

SMALL = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "num_experts": 8, "head_dim": 16,
}  # fmt: skip
HYBRID = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def small_model(family: str = "qwen3_moe", **more: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SMALL, **more)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


def new(n_tokens: int, batch: int = 2, dim: int = 5) -> torch.Tensor:
    return torch.randn(batch, 3, n_tokens, dim).bfloat16()


def test_a_step_copies_only_its_own_rows() -> None:
    layer = GrowingLayer()
    layer.update(new(100), new(100))
    memory = layer.keys.data_ptr()
    for _ in range(60):
        layer.update(new(1), new(1))
    assert layer.keys.data_ptr() == memory
    layer.crop(-20)
    layer.update(new(20), new(20))
    assert layer.keys.data_ptr() == memory
    moves = 0
    for _ in range(2000):
        before = layer.keys.data_ptr()
        layer.update(new(1), new(1))
        moves += layer.keys.data_ptr() != before
    assert moves < 20


def test_inference_mode_may_begin_and_end_between_steps() -> None:
    layer = GrowingLayer()
    with torch.inference_mode():
        layer.update(new(4), new(4))
    with torch.no_grad():
        layer.update(new(1), new(1))
        layer.update(new(1), new(1))
    with torch.inference_mode():
        layer.update(new(1), new(1))
        with pytest.raises(RuntimeError):
            layer.update(new(1, batch=1), new(1, batch=1))
    assert layer.get_seq_length() == 7


def test_only_layers_of_full_attention_grow() -> None:
    hybrid = growing_cache(small_model("qwen3_next", **HYBRID).config)
    assert [type(layer) for layer in hybrid.layers] == [LinearAttentionLayer, GrowingLayer]
    sliding = growing_cache(small_model(sliding_window=8, use_sliding_window=True, max_window_layers=0).config)
    assert {type(layer) for layer in sliding.layers} <= {GrowingLayer, DynamicSlidingWindowLayer}
    lazy = growing_cache(None)
    lazy.update(new(1), new(1), 1)
    assert [type(layer) for layer in lazy.layers] == [GrowingLayer] * 2
    assert type(lazy) is type(hybrid) is DynamicCache


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_generation_gives_the_same_cache_bit_by_bit(family: str) -> None:
    model = small_model(family, **(HYBRID if family == "qwen3_next" else {}))
    ids = torch.randint(1, 320, (2, 33), generator=torch.manual_seed(3))
    options = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ours, theirs = growing_cache(model.config), DynamicCache(config=model.config)
    tokens = [model.generate(ids, past_key_values=cache, **options) for cache in (ours, theirs)]
    assert torch.equal(*tokens)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        if isinstance(other, DynamicLayer):
            assert torch.equal(mine.keys, other.keys)
            assert torch.equal(mine.values, other.values)


@pytest.mark.parametrize("more", [{"prompt_lookup_num_tokens": 3}, {"num_beams": 3}], ids=str)
def test_rollback_and_beams(more: dict[str, Any]) -> None:
    model, tokenizer = local_model(DEMO, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(DEMO)
    for prompt in tasks.prompts(6, seed=5):
        inputs = tokenizer(prompt, return_tensors="pt")
        options = {"max_new_tokens": 12, "do_sample": False, **more}
        caches = generation_cache(model), {"past_key_values": DynamicCache(config=model.config)}
        tokens = [model.generate(**inputs, **options, **cache) for cache in caches]
        assert torch.equal(*tokens)


def test_a_model_with_another_cache_keeps_it() -> None:
    model = small_model()
    assert isinstance(generation_cache(model)["past_key_values"].layers[0], GrowingLayer)
    model.generation_config.cache_implementation = "static"
    assert generation_cache(model) == {}
    model.generation_config.cache_implementation = None
    model.generation_config.use_cache = False
    assert generation_cache(model) == {}
