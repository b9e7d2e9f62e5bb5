"""What the formats' own libraries make of packed checkpoints: models of plain weights, to compare with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert import AutoAWQConverter
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig, GgufConfig, modeling_utils
from transformers.quantizers import quantizer_finegrained_fp8, quantizer_mxfp4
from transformers.utils import logging

from synthetic.quantised import Quantised


@contextlib.contextmanager
def _without_accelerate() -> Iterator[None]:
    """transformers asks for accelerate for these checkpoints, and uses nothing of it when it unpacks them on a CPU."""
    with contextlib.ExitStack() as stack:
        for module in (quantizer_finegrained_fp8, quantizer_mxfp4, modeling_utils):
            stack.enter_context(patch.object(module, "is_accelerate_available", lambda: True))
        yield


def unpacked_model(folder: Path, form: Quantised) -> Any:
    """The bfloat16 model of a folder in the layout ``form``."""
    if form in (Quantised.GPTQ, Quantised.AWQ, Quantised.INT4_ZERO, Quantised.INT8):
        tensors = load_file(folder / "model.safetensors")
        return _load(folder, _of_gptq(tensors) if form is Quantised.GPTQ else _decompressed(folder, tensors))
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    options = {}
    if settings["quant_method"] == "compressed-tensors":
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    with _without_accelerate():
        model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model


def unpacked_gguf_model(path: Path, dtype: torch.dtype, config: Any = None) -> Any:
    """The model in a GGUF file as transformers loads it; only of families that it converts itself.

    ``config`` is for what it does not read of a file, as the width of qwen3_moe's experts.
    """
    logging.disable_progress_bar()
    with _without_accelerate():
        return AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=dtype,
            **({} if config is None else {"config": config}),
            quantization_config=GgufConfig(dequantize=True),
            experts_implementation="grouped_mm",
        ).eval()


def save_plain(model: Any, folder: Path) -> Path:
    """Store an unpacked model under transformers' own names."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    return folder


def _load(folder: Path, plain: dict[str, torch.Tensor]) -> Any:
    """The model of plain weights under their stored names."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model, report = type(AutoModelForCausalLM.from_config(config)).from_pretrained(
        None, config=config, state_dict=plain, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    return model


def _decompressed(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the package compressed_tensors, module by module: transformers does not know these layouts for experts."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    if settings["quant_method"] == "awq":
        converter = AutoAWQConverter.from_autoawq_config(settings)
        tensors, settings = converter.process(tensors), converter.update_config(None).model_dump()  # type: ignore[union-attr]
        # Weights have the dtype of their scales; rounded to float16 first they would not be the nearest in bfloat16.
        tensors = {name: each.float() if name.endswith("_scale") else each for name, each in tensors.items()}
    (group,) = settings["config_groups"].values()
    scheme = QuantizationScheme.model_validate(group)
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        base, _, part = name.rpartition(".")
        modules.setdefault(base, {})[part] = tensor
    plain: dict[str, torch.Tensor] = {}
    for base, parts in modules.items():
        whole = compressor.decompress(parts, scheme) if "weight_scale" in parts else parts
        plain |= {f"{base}.{part}": whole[part] for part in ("weight", "bias") if part in whole}
        plain |= {f"{base}.{part}": tensor for part, tensor in parts.items() if "weight" not in part}
    return plain


def _of_gptq(raw: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """No library that unpacks GPTQ on CPUs is at hand: each weight as the format's documentation says it."""
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in raw.items():
        base, _, part = name.rpartition(".")
        if part == "qweight":
            words, zeros, scales = tensor.long(), raw[f"{base}.qzeros"].long(), raw[f"{base}.scales"].float()
            # Word (i, o) holds inputs 8i to 8i + 7 of output o; the zeros are stored less one.
            codes = torch.stack([words >> 4 * nibble & 15 for nibble in range(8)], 1).flatten(0, 1)
            of_groups = torch.stack([zeros >> 4 * nibble & 15 for nibble in range(8)], 2).flatten(1) + 1
            size = len(codes) // len(scales)
            weight = (codes - of_groups.repeat_interleave(size, 0)).float() * scales.repeat_interleave(size, 0)
            plain[f"{base}.weight"] = weight.t().to(torch.bfloat16)
        elif part not in ("qzeros", "scales", "g_idx"):
            plain[name] = tensor
    return plain
