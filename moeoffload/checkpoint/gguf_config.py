"""Builds the transformers config of a GGUF file from its metadata.

This module has the keys of families whose dense tensors llama.cpp stores unchanged, because transformers' own table for
them leaves the width of experts and rope scaling at defaults. For newer families it calls transformers' function. Any
other family needs the vendor's folder in addition to the GGUF (``--dense``).

Sources: gguf-py/gguf/constants.py and conversion in llama.cpp; ``transformers.integrations.gguf``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS, get_gguf_config

from moeoffload.checkpoint.gguf_file import GgufFile
from moeoffload.errors import ModelError
from moeoffload.text import one_line

_COMMON: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_used_count": "num_experts_per_tok",
}
_OPTIONAL: Final = {"attention.key_length", "attention.sliding_window", "expert_shared_feed_forward_length"}
_END_TOKENS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True)
class Family:
    """How the metadata of one architecture maps to its transformers config.

    Attributes:
        model_type: its name in transformers.
        keys: config names of the metadata keys for the number of experts and their widths, in addition to `_COMMON`.
        constants: config values that the metadata lacks.
        rope: values of rope scaling that the metadata lacks.
    """

    model_type: str
    keys: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)


FAMILIES: Final = {
    "qwen2moe": Family(
        "qwen2_moe",
        {
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
    ),
    "qwen3moe": Family(
        "qwen3_moe",
        {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        {"norm_topk_prob": True},
    ),
    "gpt-oss": Family(
        "gpt_oss",
        {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
        rope={"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
    "minimax-m2": Family(
        "minimax_m2",
        {
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "rope.dimension_count": "rotary_dim",
        },
    ),
}
"""By ``general.architecture``: families whose dense tensors are stored as in transformers, under other names."""


_OF_TRANSFORMERS: Final = frozenset(name for name in GGUF_CONFIG_ARCHS if name.endswith("moe"))


def config_values(gguf: GgufFile) -> dict[str, Any]:
    """Returns the values that config.json would have.

    Raises ModelError when the metadata is incomplete, or the architecture is not supported without ``--dense``.
    """
    name = gguf.architecture
    if name not in FAMILIES and name not in _OF_TRANSFORMERS:
        known = ", ".join(sorted({*FAMILIES, *_OF_TRANSFORMERS}))
        raise ModelError(
            f"{gguf.files[0]}: config and dense layers of architecture {name!r} cannot be had from a GGUF file (those "
            f"of {known} can); name the folder of the vendor's checkpoint with --dense DIR"
        )
    tensors = {tensor.name: tensor for tensor in gguf.tensors}
    try:
        if name in FAMILIES:
            values = _of_family(gguf, FAMILIES[name], has_head="output.weight" in tensors)
        else:
            values = get_gguf_config(gguf.metadata, tuple(tensors))
        vocab_size = tensors["token_embd.weight"].shape[0]
    except KeyError as error:
        raise ModelError(f"{gguf.files[0]}: its metadata has no {one_line(str(error.args[0]), 100)}") from None
    except Exception as error:  # values that transformers does not expect
        raise ModelError(f"{gguf.files[0]}: its metadata gives no config: {one_line(str(error), 200)}") from error
    # An answer of gpt-oss has several parts, each with its own end token; only eos_token_id ends the answer.
    keys = _END_TOKENS[:1] if name == "gpt-oss" else _END_TOKENS
    ends = [gguf.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    ids = sorted({end for end in ends if type(end) is int})
    return {**values, "vocab_size": vocab_size, "eos_token_id": ids[0] if len(ids) == 1 else ids or None}


def _of_family(gguf: GgufFile, family: Family, *, has_head: bool) -> dict[str, Any]:
    prefix, metadata = gguf.architecture, gguf.metadata
    values: dict[str, Any] = {"model_type": family.model_type}
    for key, name in (_COMMON | family.keys).items():
        if key in _OPTIONAL and f"{prefix}.{key}" not in metadata:
            continue
        values[name] = metadata[f"{prefix}.{key}"]
        if isinstance(values[name], bool | str | list):
            raise ValueError(f"{prefix}.{key} is {values[name]!r}")
        if isinstance(values[name], float) and not math.isfinite(values[name]):
            raise ValueError(f"{prefix}.{key} is {values[name]}")
    # The multi-token-prediction layers come last; transformers' model does not have them.
    values["num_hidden_layers"] -= metadata.get(f"{prefix}.nextn_predict_layers", 0)
    return (
        values
        | family.constants
        | {
            "rope_parameters": _rope(metadata, prefix, family),
            "tie_word_embeddings": not has_head,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        }
    )


def _rope(metadata: dict[str, Any], prefix: str, family: Family) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": metadata[f"{prefix}.rope.freq_base"]}
    scaling = {key: metadata.get(f"{prefix}.rope.scaling.{key}") for key in ("type", "factor")}
    if "rope.dimension_count" in family.keys:  # rope applies to a part of each head
        rope["partial_rotary_factor"] = (
            metadata[f"{prefix}.rope.dimension_count"] / metadata[f"{prefix}.attention.key_length"]
        )
    if scaling["type"] in (None, "none"):
        return rope
    if scaling["type"] != "yarn":
        raise ValueError(f"rope scaling {scaling['type']!r} is not supported")
    original = metadata[f"{prefix}.rope.scaling.original_context_length"]
    scaled = {"rope_type": "yarn", "factor": scaling["factor"], "original_max_position_embeddings": original}
    return rope | scaled | family.rope
