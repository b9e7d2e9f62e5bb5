"""Writes GGUF files as llama.cpp's converter does for the families whose dense tensors it only renames."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import nn

from moeoffload.checkpoint.layout import build_meta_model, find_experts
from synthetic.gguf_quants import to_blocks

Values = Callable[[str, tuple[int, ...]], torch.Tensor]
"""Name and shape of a parameter of the transformers model -> its values."""

ARCHITECTURES: Final = {
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "olmoe": "olmoe",
    "glm4_moe": "glm4moe",
    "dots1": "dots1",
    "deepseek_v3": "deepseek2",
}


def write_gguf(
    config: Any,
    path: Path,
    kind: str,
    values: Values,
    *,
    down_kind: str | None = None,
    dense_kind: str = "Q8_0",
    tokenizer: Path | None = None,
    part_tensors: int = 0,
) -> None:
    """Write a model; rows that a type cannot cut into blocks are stored as F16, as llama.cpp does.

    Args:
        config: of a transformers model of a family in `ARCHITECTURES`.
        path: the file; its parts are named after it.
        kind: type of the experts' matrices.
        values: of each parameter of the model, asked for once and in order.
        down_kind: type of the experts' down projections, if it is another one.
        dense_kind: type of the other matrices.
        tokenizer: folder with a byte-level tokenizer.json to be stored in the file.
        part_tensors: the most tensors in one part; 0 writes a single file.
    """
    model = build_meta_model(config, torch.float32)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type], split_max_tensors=part_tensors)
    _metadata(writer, config)
    if tokenizer is not None:
        _tokenizer(writer, tokenizer)
    tensors = list(_tensors(config, model, kind, down_kind or kind, dense_kind))
    for name, _, shape, each, _ in tensors:
        n_weights, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[each]]
        row = shape[-1] // n_weights * n_bytes
        stored = (*shape[:-1], row)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), GGMLQuantizationType[each])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    source: tuple[str, torch.Tensor] | None = None
    for _, parameter, shape, each, cut in tensors:
        if source is None or source[0] != parameter:
            source = parameter, values(parameter, tuple(model.state_dict()[parameter].shape))
        # An expert at a time: on the way there are several copies in float32.
        rows = cut(source[1]).reshape(shape).split(1)
        blocks = [
            to_blocks(np.ascontiguousarray(part.float().numpy()), each)
            for part in (rows if len(shape) > 2 else [torch.cat(rows)])
        ]
        writer.write_tensor_data(np.concatenate(blocks))
    writer.close()


_Tensor = tuple[str, str, tuple[int, ...], str, Callable[[torch.Tensor], torch.Tensor]]
"""Name, parameter that it comes from, shape, type, and what of the parameter it is."""


def _tensors(config: Any, model: nn.Module, kind: str, down_kind: str, dense_kind: str) -> Iterator[_Tensor]:
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[ARCHITECTURES[config.model_type]], config.num_hidden_layers)
    experts = find_experts(model)
    for parameter, tensor in model.state_dict().items():
        module = parameter.rpartition(".")[0]
        if module in experts:
            yield from _of_experts(parameter, experts[module], kind, down_kind)
            continue
        if parameter == "lm_head.weight" and config.tie_word_embeddings:
            continue
        spelled = parameter.replace("score_correction_bias", "score_correction.bias")
        name = names.get_name(spelled, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"{parameter}: gguf has no name for it")
        name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        shape = tuple(tensor.shape)[1:] if "ffn_gate_inp_shexp" in name else tuple(tensor.shape)
        plain = len(shape) == 1 or "ffn_gate_inp" in name
        yield name, parameter, shape, "F32" if plain else _fitting(dense_kind, shape), lambda values: values


def _of_experts(parameter: str, module: Any, kind: str, down_kind: str) -> Iterator[_Tensor]:
    layer = next(part for part in parameter.split(".") if part.isdigit())
    leaf = parameter.rpartition(".")[2]
    is_bias = leaf.endswith("_bias")
    shape = tuple(module.get_parameter(leaf).shape)
    turned = module.is_transposed and not is_bias
    shape = (shape[0], *shape[:0:-1]) if turned else shape

    def cut(which: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
        def of(values: torch.Tensor) -> torch.Tensor:
            rows = values.transpose(1, 2) if turned else values
            if which is None:
                return rows
            return rows.chunk(2, dim=1)[which] if module.is_concatenated else rows[:, which::2]

        return of

    ending = "bias" if is_bias else "weight"
    if leaf.startswith("down"):
        each = "F32" if is_bias else _fitting(down_kind, shape)
        yield f"blk.{layer}.ffn_down_exps.{ending}", parameter, shape, each, cut(None)
        return
    half = (shape[0], shape[1] // 2, *shape[2:])
    for which, projection in enumerate(("gate", "up")):
        each = "F32" if is_bias else _fitting(kind, half)
        yield f"blk.{layer}.ffn_{projection}_exps.{ending}", parameter, half, each, cut(which)


def _fitting(kind: str, shape: tuple[int, ...]) -> str:
    return "F16" if shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] else kind


def _metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(width)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "minimax_m2":
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for token, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        number = getattr(config, f"{token}_token_id", None)
        if number is not None:
            add(number)


def _tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    tokens = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    tokens |= {number: token["content"] for number, token in added.items()}
    numbers = range(len(tokens))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    kinds = [gguf.TokenType.CONTROL if number in added else gguf.TokenType.NORMAL for number in numbers]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([tokens[number] for number in numbers])
    writer.add_token_types(kinds)
    if merges:
        writer.add_token_merges(merges)
    else:  # transformers would derive merges from scores
        writer.add_token_scores([0.0] * len(tokens))
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())
