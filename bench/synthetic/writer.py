"""Writes checkpoints with random weights, one tensor at a time, in the layouts that are found on the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from moeoffload.checkpoint.layout import build_meta_model
from moeoffload.checkpoint.tensors import DTYPES, INDEX_FILE, SINGLE_FILE
from synthetic.configs import tiny_config
from synthetic.quantised import Quantised, encode, settings_of
from synthetic.tokenizer import write_tokenizer

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Layout(StrEnum):
    """How routed experts are stored."""

    PER_EXPERT = "per-expert"
    """Under the names of the hub's originals: one tensor per expert and projection where the family does that."""
    FUSED = "fused"
    """Under the names of the transformers model: one tensor per layer and parameter."""


def write_tiny(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    layout: Layout | str = Layout.PER_EXPERT,
    shard_bytes: int | None = None,
    experts: int = 8,
    layers: int | None = None,
    form: Quantised | str | None = None,
    **values: Any,
) -> Path:
    """Write a tiny random checkpoint of ``family`` (see TINY_FAMILIES) with tokenizer to ``folder``, and return it.

    ``shard_bytes`` is the most data in one file; None writes a single file. ``values`` replace some of the config.
    """
    config = tiny_config(family, experts=experts, layers=layers)
    config.update(values)
    return write_checkpoint(config, folder, seed=seed, dtype=dtype, layout=layout, shard_bytes=shard_bytes, form=form)


def write_checkpoint(
    config: Any,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    layout: Layout | str = Layout.PER_EXPERT,
    shard_bytes: int | None = None,
    form: Quantised | str | None = None,
    values: Callable[[str], torch.Tensor] | None = None,
) -> Path:
    """Write config, tokenizer and weights of ``config`` to ``folder`` (made when missing), and return it.

    ``values`` gives a tensor by the name that it is stored under. Without it weights are random: matrices have standard
    deviation 1/sqrt(columns), norms are ones; equal arguments give equal bytes, and how the files are cut does not
    change a tensor. Holds no more than one tensor in memory. With ``form`` the weights are stored
    quantised, under the names of the hub's originals.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = build_meta_model(config, dtype)
    plain = _stored_tensors(model, Layout(layout))
    quantised = Quantised(form) if form else None
    if quantised:
        config.quantization_config = settings_of(quantised, config.model_type)

    def stored(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return encode(quantised, config.model_type, name, tensor) if quantised else {name: tensor}

    def value_of(name: str) -> torch.Tensor:
        if values is not None:
            return values(name)
        return random_values(name, tuple(plain[name].shape), plain[name].dtype, seed)

    tensors = {name: stored(name, tensor) for name, tensor in plain.items()}
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    write_tokenizer(folder, config.get_text_config().vocab_size)
    shards = list(_cut(tensors, shard_bytes))
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        weight_map = {
            part: name for name, shard in zip(names, shards, strict=True) for parts in shard.values() for part in parts
        }
        total = sum(_nbytes(parts) for parts in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, ((tensor, stored(tensor, value_of(tensor))) for tensor in shard))
    return folder


def _nbytes(parts: dict[str, torch.Tensor]) -> int:
    return sum(part.nbytes for part in parts.values())


def _stored_tensors(model: nn.Module, layout: Layout) -> dict[str, torch.Tensor]:
    """Name -> meta tensor of everything that is stored; tied weights once."""
    kept = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    state = {name: tensor for name, tensor in model.state_dict().items() if name in kept}
    # transformers' own way of saving runs on meta tensors as well, and so gives names and shapes without any data.
    return revert_weight_conversion(model, state) if layout is Layout.PER_EXPERT else state


def _cut(
    tensors: dict[str, dict[str, torch.Tensor]], shard_bytes: int | None
) -> Iterator[dict[str, dict[str, torch.Tensor]]]:
    shard: dict[str, dict[str, torch.Tensor]] = {}
    held = 0
    for name, parts in tensors.items():
        if shard and shard_bytes is not None and held + _nbytes(parts) > shard_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = parts
        held += _nbytes(parts)
    yield shard


def _write_file(
    file: Path,
    shard: dict[str, dict[str, torch.Tensor]],
    values: Iterator[tuple[str, dict[str, torch.Tensor]]],
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ((name, part) for parts in shard.values() for name, part in parts.items()):
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # The format wants the data to start at a multiple of eight.
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, parts in values:
            for part in parts.values():
                stream.write(part.contiguous().flatten().view(torch.uint8).numpy().data)


def random_values(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The values of one tensor of a checkpoint; see `write_checkpoint`."""
    tensor = torch.empty(shape, dtype=dtype)
    if not tensor.is_floating_point():
        return tensor.zero_()
    if tensor.ndim == 1 and "norm" in name:
        return tensor.fill_(1)
    # The name is part of the seed, so that a tensor does not depend on what else is written.
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8]))
    return tensor.normal_(0, shape[-1] ** -0.5 if tensor.ndim > 1 else 0.02, generator=generator)
