"""Tiny models in GGUF files for tests, and what the gguf package and transformers make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from models import written_once
from synthetic import tiny_config, write_checkpoint
from synthetic.gguf_quants import to_blocks
from synthetic.gguf_writer import write_gguf
from transformers import AutoModelForCausalLM, MiniMaxM2Config

from moeoffload.checkpoint.layout import build_meta_model

WIDTH = 256
"""Of rows: K-quants need that many weights."""


def wide_config(family: str) -> Any:
    """A tiny config whose rows have whole blocks of every type."""
    if family == "minimax_m2":
        return MiniMaxM2Config(
            vocab_size=320, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, num_experts_per_tok=2, num_local_experts=8, rotary_dim=8,
            max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
    config = tiny_config(family)
    config.hidden_size = WIDTH
    for name in ("moe_intermediate_size", "intermediate_size", "shared_expert_intermediate_size"):
        if hasattr(config, name):
            setattr(config, name, WIDTH)
    return config


def write_model(family: str, folder: Path, kind: str, *, name: str = "m.gguf", **how: Any) -> Path:
    """A random model as a folder of transformers' and beside it as a GGUF file, which is given back."""
    written_once(folder, (family, kind, name, str(how)), lambda place: _write(family, place, kind, name, **how))
    parts = sorted(folder.glob(name.replace(".gguf", "-*.gguf")))
    return parts[0] if parts else folder / name


def _write(family: str, folder: Path, kind: str, name: str, **how: Any) -> None:
    write_checkpoint(wide_config(family), folder, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Random, too, where synthetic checkpoints have ones: a norm that lands elsewhere must be seen.
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.state_dict().values():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.2)
    model.save_pretrained(folder)
    values = model.state_dict()
    write_gguf(model.config, folder / name, kind, lambda name, _: values[name], tokenizer=folder, **how)


def unpacked(*paths: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the files, as the gguf package unpacks it to float32."""
    tensors = [tensor for path in paths for tensor in gguf.GGUFReader(path).tensors]
    return {
        tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).reshape(
            [int(size) for size in tensor.shape[::-1]]
        )
        for tensor in tensors
    }


def experts_of(tensors: dict[str, torch.Tensor], layer: int, *, interleaved: bool) -> dict[str, torch.Tensor]:
    """The matrices of a layer's experts, (n_experts, out, in), by names of transformers, and their biases."""
    found: dict[str, torch.Tensor] = {}
    for ending, suffix in (("weight", ""), ("bias", "_bias")):
        names = [f"blk.{layer}.ffn_{which}_exps.{ending}" for which in ("gate", "up", "down")]
        if names[0] not in tensors:
            continue
        gate, up, down = (tensors[name] for name in names)
        join = torch.stack([gate, up], dim=2).flatten(1, 2) if interleaved else torch.cat([gate, up], dim=1)
        found |= {f"gate_up_proj{suffix}": join, f"down_proj{suffix}": down}
    return found


def reference_model(folder: Path, path: Path, dtype: torch.dtype) -> Any:
    """The model of ``folder`` with the numbers of its GGUF file (all parts beside it), put in place by hand."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="grouped_mm").eval()
    arch = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[
        gguf.GGUFReader(path).fields["general.architecture"].contents()
    ]
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    parts = path.name.replace("-00001-of-", "-*-of-")
    tensors = unpacked(*sorted(path.parent.glob(parts)))
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if ".experts." in name:
                continue
            if name.endswith("e_score_correction_bias"):
                parameter.copy_(tensors[f"blk.{name.split('.')[2]}.exp_probs_b.bias"])
                continue
            known = names.get_name(name, try_suffixes=(".weight", ".bias"))
            known = known if known in tensors else f"{known}.weight"
            parameter.copy_(tensors[known].reshape(parameter.shape))
        for number, layer in enumerate(model.model.layers):
            experts = getattr(layer.mlp, "experts", None)
            if experts is None:
                continue
            for name, values in experts_of(tensors, number, interleaved=not experts.is_concatenated).items():
                turned = experts.is_transposed and values.ndim == 3
                getattr(experts, name).copy_(values.transpose(1, 2) if turned else values)
    return model


def write_qwen35(path: Path) -> None:
    """A random model of a family whose dense tensors llama.cpp changes; every tensor as the converter names it."""
    config = wide_config("qwen3_5_moe")
    writer = gguf.GGUFWriter(path, "qwen35moe")
    for name, value in {
        "context_length": config.max_position_embeddings, "block_count": 2, "embedding_length": WIDTH,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "full_attention_interval": 2, "rope.dimension_count": 8,
        "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads, "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": WIDTH,
        "expert_shared_feed_forward_length": WIDTH,
    }.items():  # fmt: skip
        writer.add_uint32(f"qwen35moe.{name}", value)
    writer.add_float32("qwen35moe.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen35moe.rope.freq_base", 1e6)
    writer.add_array("qwen35moe.rope.dimension_sections", [2, 1, 1, 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    random = np.random.default_rng(4)

    def add(name: str, shape: tuple[int, ...], kind: str = "F32") -> None:
        values = random.standard_normal(shape, dtype=np.float32) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
        values = 1 + values if "norm" in name else -np.abs(values) - 0.1 if name.endswith("ssm_a") else values
        if kind == "F32":
            writer.add_tensor(name, values.astype(np.float32))
        else:
            writer.add_tensor(name, to_blocks(values, kind), raw_dtype=gguf.GGMLQuantizationType[kind])

    names: Any = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35MOE, 2)
    model = build_meta_model(config, torch.float32)
    for name, tensor in model.state_dict().items():
        shape = tuple(size for size in tensor.shape if size > 1) if "conv1d" in name or "expert_gate" in name else None
        shape = shape or tuple(tensor.shape)
        if name.endswith("experts.gate_up_proj"):
            for which in ("gate", "up"):
                add(f"blk.{name.split('.')[2]}.ffn_{which}_exps.weight", (shape[0], shape[1] // 2, shape[2]), "Q4_K")
            continue
        known = names.get_name(name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        known = f"{known}.weight" if known.endswith("_exps") else known
        kind = "Q6_K" if "exps" in known else "Q8_0" if len(shape) == 2 and "ssm" not in known else "F32"
        add(known, shape, "F32" if "inp" in known else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
