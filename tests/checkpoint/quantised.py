"""Quantised checkpoints of the published layouts, and the models that the formats' libraries make of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from synthetic import Quantised, tiny_config, write_checkpoint
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig
from transformers.quantizers import quantizer_finegrained_fp8, quantizer_mxfp4


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
    Case("qwen3_moe", Quantised.AWQ, "int4", WIDE),
]


@contextlib.contextmanager
def without_accelerate() -> Iterator[None]:
    """transformers wants accelerate for these checkpoints, and does not use it when it unpacks them on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (quantizer_finegrained_fp8, quantizer_mxfp4):
            patch.setattr(module, "is_accelerate_available", lambda: True)
        yield


def write(case: Case, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    if case.family in ("deepseek_v4", "minimax_m2"):
        config = CONFIG_MAPPING[case.family](**case.values)
    else:
        config = tiny_config(case.family)
        config.update(case.values)
    return write_checkpoint(config, folder, dtype=dtype, form=case.form)


def reference(folder: Path, case: Case) -> Any:
    """The model as the format's library unpacks it."""
    if case.form in (Quantised.GPTQ, Quantised.AWQ):
        return load(folder, unpacked_by_hand(folder, case.form))
    if case.form in (Quantised.INT4_ZERO, Quantised.INT8):
        return load(folder, decompressed(folder))
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    options = {}
    if settings["quant_method"] == "compressed-tensors":
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    with without_accelerate():
        model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model


def save_plain(model: Any, folder: Path) -> Path:
    """Store an unpacked model under transformers' own names."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    return folder


def load(folder: Path, plain: dict[str, torch.Tensor]) -> Any:
    """The model of plain weights under their stored names."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model, report = type(AutoModelForCausalLM.from_config(config)).from_pretrained(
        None, config=config, state_dict=plain, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    return model


def decompressed(folder: Path) -> dict[str, torch.Tensor]:
    """By the package compressed_tensors, module by module: transformers does not know these layouts for experts."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme.model_validate(settings["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        base, _, part = name.rpartition(".")
        modules.setdefault(base, {})[part] = tensor
    plain: dict[str, torch.Tensor] = {}
    for base, parts in modules.items():
        whole = compressor.decompress(parts, scheme) if "weight_scale" in parts else parts
        plain |= {f"{base}.{part}": whole[part] for part in ("weight", "bias") if part in whole}
        plain |= {f"{base}.{part}": tensor for part, tensor in parts.items() if "weight" not in part}
    return plain


def unpacked_by_hand(folder: Path, form: Quantised) -> dict[str, torch.Tensor]:
    """No library that unpacks GPTQ and AWQ on CPUs is at hand: each weight as their documentation says it."""
    raw = load_file(folder / "model.safetensors")
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in raw.items():
        base, _, part = name.rpartition(".")
        if part == "qweight":
            words, zeros, scales = tensor.long(), raw[f"{base}.qzeros"].long(), raw[f"{base}.scales"].float()
            if form is Quantised.GPTQ:
                # Word (i, o) holds inputs 8i to 8i + 7 of output o; the zeros are stored less one.
                codes = torch.stack([words >> 4 * nibble & 15 for nibble in range(8)], 1).flatten(0, 1)
                of_groups = torch.stack([zeros >> 4 * nibble & 15 for nibble in range(8)], 2).flatten(1) + 1
            else:
                codes, of_groups = (of_awq(each) for each in (words, zeros))
            size = len(codes) // len(scales)
            weight = (codes - of_groups.repeat_interleave(size, 0)).float() * scales.repeat_interleave(size, 0)
            plain[f"{base}.weight"] = weight.t().to(torch.bfloat16)
        elif part not in ("qzeros", "scales", "g_idx"):
            plain[name] = tensor
    return plain


def of_awq(words: torch.Tensor) -> torch.Tensor:
    """Nibble i of word (row, w) holds column 8w + (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    values = torch.empty(len(words), 8 * words.shape[1], dtype=torch.int64)
    for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        values[:, column::8] = words >> 4 * nibble & 15
    return values
