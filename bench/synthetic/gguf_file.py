"""Writes a Qwen3 MoE checkpoint as GGUF in bfloat16, without vocabulary, for llama.cpp's tools to quantise and run."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import AutoConfig

from moeoffload.checkpoint.tensors import TensorIndex, TensorReader

_LAYER: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
_WHOLE: Final = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_FLOAT32: Final = ("norm", "ffn_gate_inp")
_EXPERTS: Final = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def write_gguf(checkpoint: Path, file: Path) -> None:
    """Writes ``file`` from the safetensors of ``checkpoint`` (a ``qwen3_moe`` with one tensor per expert)."""
    config = AutoConfig.from_pretrained(checkpoint)
    n_layers, n_experts = config.num_hidden_layers, config.num_experts
    writer = GGUFWriter(file, "qwen3moe")
    writer.add_block_count(n_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(n_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    index = TensorIndex.open(checkpoint)
    with TensorReader() as reader:

        def add(name: str, tensor: torch.Tensor) -> None:
            if any(part in name for part in _FLOAT32):
                writer.add_tensor(f"{name}.weight", tensor.float().numpy())
            else:
                raw = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
                writer.add_tensor(f"{name}.weight", np.ascontiguousarray(raw), raw_dtype=GGMLQuantizationType.BF16)

        for theirs, name in _WHOLE.items():
            add(name, reader.read(index[f"{theirs}.weight"]))
        for layer in range(n_layers):
            prefix = f"model.layers.{layer}"
            for theirs, name in _LAYER.items():
                add(f"blk.{layer}.{name}", reader.read(index[f"{prefix}.{theirs}.weight"]))
            for theirs, name in _EXPERTS.items():
                each = [
                    reader.read(index[f"{prefix}.mlp.experts.{expert}.{theirs}.weight"]) for expert in range(n_experts)
                ]
                add(f"blk.{layer}.{name}", torch.stack(each))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
