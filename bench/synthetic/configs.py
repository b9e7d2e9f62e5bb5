"""The configs of synthetic checkpoints: published geometries, and tiny ones of one architecture each.

Geometries are those of the config.json files of Qwen/Qwen3-30B-A3B, Qwen/Qwen1.5-MoE-A2.7B,
mistralai/Mixtral-8x7B-v0.1, deepseek-ai/DeepSeek-V3, openai/gpt-oss-20b and allenai/OLMoE-1B-7B-0924 on the Hugging
Face hub.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

from moeoffload.errors import ModelError
from synthetic.tokenizer import BOS_ID, EOS_ID, PAD_ID

# name -> (model_type, key of the number of experts, config values)
GEOMETRIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "qwen3_moe",
        "num_experts",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
        },
    ),
    "qwen1.5-moe-a2.7b": (
        "qwen2_moe",
        "num_experts",
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 8192,
            "rope_theta": 1e6,
        },
    ),
    "mixtral-8x7b": (
        "mixtral",
        "num_local_experts",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        "n_routed_experts",
        {
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_nextn_predict_layers": 0,
        },
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        "num_local_experts",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
        },
    ),
    "olmoe-1b-7b": (
        "olmoe",
        "num_experts",
        {
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 4096,
        },
    ),
}

_MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}

_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_HYBRID = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}

# family -> (key of the number of experts, config values beside the common ones)
_TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("num_local_experts", {"intermediate_size": 32}),
    "qwen2_moe": ("num_experts", {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}),
    "qwen3_moe": ("num_experts", {"moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_next": ("num_experts", _HYBRID),
    "qwen3_5_moe_text": ("num_experts", _HYBRID),
    "olmoe": ("num_experts", {"intermediate_size": 32}),
    "deepseek_v2": (
        "n_routed_experts",
        {"moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 0} | _MLA,
    ),
    "deepseek_v3": (
        "n_routed_experts",
        {
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
        }
        | _MLA,
    ),
    "glm4_moe": (
        "n_routed_experts",
        {"moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    ),
    "gpt_oss": ("num_local_experts", {"intermediate_size": 32, "head_dim": 16}),
    "granitemoe": ("num_local_experts", {"intermediate_size": 32}),
    "granitemoehybrid": (
        "num_local_experts",
        {"intermediate_size": 32, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]} | _MAMBA,
    ),
    "nemotron_h": (
        "n_routed_experts",
        {
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "num_hidden_layers": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "head_dim": 16,
            "chunk_size": 16,
        },
    ),
    "dots1": (
        "n_routed_experts",
        {"moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "hunyuan_v1_moe": ("num_experts", {"intermediate_size": 32, "head_dim": 16}),
}
# The text model has a model_type of its own; the family is known by the name of the whole.
_MODEL_TYPES = {"qwen3_5_moe": "qwen3_5_moe_text"}

TINY_FAMILIES = tuple(family.removesuffix("_text") for family in _TINY)


def geometry_config(name: str, *, layers: int | None = None, experts: int | None = None, vocab: int = 32000) -> Any:
    """The transformers config of a published geometry with another number of layers, experts or vocabulary entries.

    Raises ModelError for a name that is not in GEOMETRIES.
    """
    if name not in GEOMETRIES:
        raise ModelError(f"{name}: no such geometry; there are {', '.join(GEOMETRIES)}")
    model_type, experts_key, values = GEOMETRIES[name]
    values = dict(values, vocab_size=vocab, num_hidden_layers=layers or values["num_hidden_layers"])
    if experts is not None:
        values[experts_key] = experts
        values["num_experts_per_tok"] = min(experts, values["num_experts_per_tok"])
        values |= {key: 1 for key in ("n_group", "topk_group") if key in values}
    return _config(model_type, values)


def tiny_config(family: str, *, layers: int | None = None, experts: int = 8, vocab: int = 320) -> Any:
    """The transformers config of a tiny text model of ``family``: hidden 64, expert width 32, top-2, 2 or 3 layers.

    Raises ModelError for a family that is not in TINY_FAMILIES.
    """
    model_type = _MODEL_TYPES.get(family, family)
    if model_type not in _TINY:
        raise ModelError(f"{family}: no such tiny family; there are {', '.join(TINY_FAMILIES)}")
    experts_key, values = _TINY[model_type]
    common = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers or (3 if "first_k_dense_replace" in values else 2),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
    }
    if layers is not None and "layer_types" in values:
        types = values["layer_types"]
        values = values | {"layer_types": [types[layer % len(types)] for layer in range(layers)]}
    return _config(model_type, common | values | {experts_key: experts})


def _config(model_type: str, values: dict[str, Any]) -> Any:
    tokens = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "tie_word_embeddings": False}
    return CONFIG_MAPPING[model_type](**(tokens | values))
