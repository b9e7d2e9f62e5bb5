"""Tiny models in GGUF files for tests, and what the gguf package and transformers make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize
from synthetic import tiny_config, write_checkpoint
from synthetic.gguf_writer import write_gguf
from transformers import AutoModelForCausalLM

WIDTH = 256
"""Of rows: K-quants need that many weights."""


def wide_config(family: str) -> Any:
    """A tiny config whose rows have whole blocks of every type."""
    config = tiny_config(family)
    config.hidden_size = WIDTH
    for name in ("moe_intermediate_size", "intermediate_size", "shared_expert_intermediate_size"):
        if hasattr(config, name):
            setattr(config, name, WIDTH)
    return config


def write_model(family: str, folder: Path, kind: str, *, name: str = "m.gguf", **how: Any) -> Path:
    """A random model as a folder of transformers' and beside it as a GGUF file, which is given back."""
    write_checkpoint(wide_config(family), folder, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Random, too, where synthetic checkpoints have ones: a norm that lands elsewhere must be seen.
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.2)
    model.save_pretrained(folder)
    values = model.state_dict()
    write_gguf(model.config, folder / name, kind, lambda name, _: values[name], tokenizer=folder, **how)
    parts = sorted(folder.glob(name.replace(".gguf", "-*.gguf")))
    return parts[0] if parts else folder / name


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
    found = {}
    for ending, suffix in (("weight", ""), ("bias", "_bias")):
        parts = [tensors.get(f"blk.{layer}.ffn_{which}_exps.{ending}") for which in ("gate", "up", "down")]
        if parts[0] is None:
            continue
        gate, up, down = parts
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
        for name, parameter in model.named_parameters():
            if ".experts." in name:
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
