"""Quantised checkpoints of the published layouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import written_once
from synthetic import Quantised, tiny_config, write_checkpoint
from transformers import CONFIG_MAPPING


@dataclass(frozen=True)
class Case:
    """A checkpoint to write: a family, its layout, what differs from the tiny config."""

    family: str
    form: Quantised
    name: str
    """Of the experts' format."""
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.family}-{self.form}"


# Widths of 96 and 192 cut blocks of 128 rows, 256 and 384 keep them whole.
WIDE = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 384}
CUT = {"hidden_size": 256, "moe_intermediate_size": 96}
DEEPSEEK_V4 = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 320,
    "pad_token_id": 0,
}
MINIMAX_M2 = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 320,
}
CASES = [
    Case("deepseek_v3", Quantised.FP8, "fp8", WIDE),
    Case("qwen3_moe", Quantised.FP8, "fp8", CUT),
    Case("minimax_m2", Quantised.FP8, "fp8", MINIMAX_M2),
    Case("deepseek_v4", Quantised.FP8_FP4, "mxfp4", DEEPSEEK_V4),
    Case("qwen3_moe", Quantised.MXFP8, "mxfp8", CUT),
    Case("gpt_oss", Quantised.MXFP4, "mxfp4", {"hidden_size": 128, "intermediate_size": 128}),
    Case("qwen3_moe", Quantised.FP8_CHANNEL, "fp8", CUT),
    Case("qwen3_moe", Quantised.MXFP4, "mxfp4", CUT),
    Case("deepseek_v3", Quantised.INT4, "int4", WIDE | {"kv_lora_rank": 32}),
    Case("qwen3_moe", Quantised.INT4_ZERO, "int4", WIDE | {"head_dim": 64}),
    Case("qwen3_moe", Quantised.INT8, "int8", CUT),
    Case("qwen3_moe", Quantised.INT8_PACKED, "int8", WIDE | {"head_dim": 64}),
    Case("qwen3_moe", Quantised.GPTQ, "int4", WIDE),
    Case("qwen3_moe", Quantised.AWQ, "int4", WIDE | {"moe_intermediate_size": 128}),  # rows of one group
]


def write(case: Case, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    if case.family in ("deepseek_v4", "minimax_m2"):
        config = CONFIG_MAPPING[case.family](**case.values)
    else:
        config = tiny_config(case.family)
        config.update(case.values)
    key = (str(case), str(case.values), dtype)
    written_once(folder, key, lambda place: write_checkpoint(config, place, dtype=dtype, form=case.form))
    return folder
