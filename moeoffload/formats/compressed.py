"""compressed-tensors: integers of 4 and 8 bits, FP8, MXFP8 and MXFP4.

``pack-quantized``: int32 words of unsigned codes, the first in the lowest bits (which on little-endian machines is the
byte order of `PackedWeights`), zero points packed along the rows. ``int-quantized`` and ``float-quantized``: a byte per
weight. Source: the package ``compressed_tensors`` 0.20, ``compressors`` and ``config``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from moeoffload.formats import fp8, mxfp4
from moeoffload.formats.conversion import convert, split_zeros
from moeoffload.formats.file_format import FileFormat, Packing, Parts, as_bytes, check_shape, codes_and_scales
from moeoffload.formats.int4 import check_groups, check_order, check_zeros, int4_format
from moeoffload.formats.packed import Codes, PackedFormat

_LAYOUTS: Final = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)


def check(settings: Mapping[str, Any]) -> None:
    """Raises ValueError, in one line, for layouts that are not supported."""
    groups = settings.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    if not groups or not all(isinstance(group, dict) and isinstance(group.get("weights"), dict) for group in groups):
        raise ValueError("compressed-tensors without config_groups for weights")
    if settings.get("transform_config"):
        raise ValueError("compressed-tensors with transform_config: weights that belong to rotated activations")
    for group in groups:
        layout = group.get("format") or settings.get("format")
        if layout not in _LAYOUTS:
            raise ValueError(f"compressed-tensors, format {str(layout)[:40]}")


def _pack_int(parts: Parts, settings: Mapping[str, Any]) -> Packing:
    """Packs (..., out, words) int32 of 4-bit or 8-bit integers, or (..., out, in) int8.

    The shape of the scales determines which, and whether there is one for each row or for each group of a row.
    """
    *lead, n_out, n_words = parts["weight"].shape
    n_groups, is_int8 = parts["scale"].shape[-1], parts["weight"].dtype is torch.int8
    for n_bits, size in _int_groups(settings):
        n_in = n_words if is_int8 else n_words * 32 // n_bits
        if n_groups != (-(-n_in // size) if size else 1):
            continue
        check_shape("scale", parts["scale"], *lead, n_out, n_groups)
        shape = (*lead, n_out, n_in)
        if n_bits == 8 or is_int8:
            return Packing(_int8_format(parts, size), shape, codes_and_scales if is_int8 else _offset_bytes)
        form = int4_format(parts["scale"], size, with_zeros="zeros" in parts)
        if "zeros" in parts:
            check_zeros(parts["zeros"], *lead, -(-n_out * n_bits // 32), n_groups)
        return Packing(form, shape, _nibble_words)
    raise ValueError(
        f"its codes {tuple(parts['weight'].shape)} and scales {tuple(parts['scale'].shape)} fit no group of the config "
        "with 4 or 8 bits"
    )


def _pack_fp8(parts: Parts, settings: Mapping[str, Any]) -> Packing:
    block = next((block for weights in _weights(settings) if (block := weights.get("block_structure"))), None)
    if isinstance(block, str):  # as older versions write it: "128x128"
        block = [int(number) if number.isdecimal() else number for number in block.split("x")]
    return fp8.pack(parts, {"weight_block_size": block})


def _weights(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from (group["weights"] for group in settings["config_groups"].values())


def _int_groups(settings: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yields bits and group size (0: a whole row) of the config's groups of integer weights."""
    for weights in _weights(settings):
        n_bits, size = weights.get("num_bits"), weights.get("group_size") or 0
        if weights.get("type", "int") != "int" or n_bits not in (4, 8) or type(size) is not int:
            continue
        if weights.get("strategy", "group" if size > 0 else "channel") in ("group", "channel"):
            yield n_bits, max(0, size)


def _int8_format(parts: Parts, size: int) -> PackedFormat:
    if "zeros" in parts:
        raise ValueError("8 bits with zero points are not supported")
    return PackedFormat("int8", Codes.INT8, check_groups(parts["scale"], size), group=size)


def _check_words(parts: Parts, per_word: int) -> None:
    shape = len(parts["weight"]), per_word * parts["weight"].shape[1]
    if "shape" in parts and tuple(parts["shape"].flatten().tolist()) != shape:
        raise ValueError(f"its weight_shape is {parts['shape'].tolist()}, its words hold {list(shape)}")
    check_order(parts, shape[1] // parts["scale"].shape[1])


def _nibble_words(parts: Parts) -> dict[str, torch.Tensor]:
    _check_words(parts, 8)
    codes, scales = parts["weight"], parts["scale"]
    sections = {"codes": as_bytes(codes), "scales": as_bytes(scales)}
    if "zeros" in parts:
        sections["offsets"] = split_zeros(parts["zeros"])[: len(codes)]
    return sections


def _offset_bytes(parts: Parts) -> dict[str, torch.Tensor]:
    _check_words(parts, 4)
    stored = as_bytes(parts["weight"])
    n_rows, n_bytes = stored.shape
    codes = convert("moe_flip_signs", stored, (n_rows, n_bytes), n_rows, n_bytes)
    return {"codes": stored ^ 128 if codes is None else codes, "scales": as_bytes(parts["scale"])}


_ZEROS: Final = {"zeros": (".weight_zero_point",)}
FILE_FORMATS: Final = (
    FileFormat(
        ".weight_packed",
        (torch.int32,),
        {"scale": (".weight_scale",), "g_idx": (".weight_g_idx",), "shape": (".weight_shape",), **_ZEROS},
        _pack_int,
        optional=frozenset({"zeros", "g_idx", "shape"}),
    ),
    FileFormat(".weight_packed", (torch.uint8,), {"scale": (".weight_scale",)}, mxfp4.pack_bytes),
    FileFormat(".weight", (torch.float8_e4m3fn,), {"scale": (".weight_scale",)}, _pack_fp8),
    FileFormat(
        ".weight", (torch.int8,), {"scale": (".weight_scale",), **_ZEROS}, _pack_int, optional=frozenset({"zeros"})
    ),
)
