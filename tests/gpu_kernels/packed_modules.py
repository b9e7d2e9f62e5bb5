"""Experts modules with packed weights, and the same ones unpacked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from packed_weights import pack_experts, random_packed, unpacked

from moeoffload.formats.packed import PackedFormat, PackedWeights, Scales

from .experts_modules import make_experts


def make_packed(
    kind: str, forms: tuple[PackedFormat, ...], shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> tuple[Any, Any]:
    """The same experts packed, and plain; of two formats, one is that of gates, the other of ups and down.

    ``shape``: (n_experts, hidden, inter).
    """
    n_experts, hidden, inter = shape
    packed, plain = (make_experts(kind, n_experts, hidden, inter, dtype, device) for _ in range(2))
    n_up = (2 if plain.has_gate else 1) * inter // len(forms)
    up = tuple(_on(random_packed(form, n_experts, n_up, hidden, seed), device) for seed, form in enumerate(forms))
    down = (_on(random_packed(forms[-1], n_experts, hidden, inter, 7), device),)
    for name, parts in (("gate_up_proj" if plain.has_gate else "up_proj", up), ("down_proj", down)):
        weights = unpacked(parts, dtype)
        getattr(plain, name).copy_(weights.transpose(1, 2) if plain.is_transposed else weights)
    return pack_experts(packed, up, down, dtype), plain


def without_the_least(packed: PackedWeights) -> PackedWeights:
    """The same without scales of which bfloat16 weights become subnormal: the interpreter takes those for zero."""
    dtype = {Scales.F32: torch.float32, Scales.BF16: torch.bfloat16}.get(packed.format.scales)
    if packed.scales is not None:
        packed.scales[packed.scales < 2.0**-60] = 0
    elif dtype is not None:
        scales = packed.section("scales").contiguous().view(dtype)
        packed.section("scales").copy_(torch.where(scales < 2.0**-60, 0, scales).view(torch.uint8))
    return packed


def _on(packed: PackedWeights, device: str) -> PackedWeights:
    packed = without_the_least(packed)
    scales = None if packed.scales is None else packed.scales.to(device)
    return replace(packed, data=packed.data.to(device), scales=scales)
