"""AWQ, 4 bits: ``qweight`` (in, out / 8) int32, ``qzeros`` (groups, out / 8) int32, ``scales`` (groups, out).

A word holds eight neighbouring rows' weights in the order 0, 2, 4, 6, 1, 3, 5, 7; a weight is (code - zero) * scale.
Source: AutoAWQ ``modules/linear/gemm.py`` and ``utils/packing_utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from moeoffload.formats.conversion import split_zeros, transpose_codes, transpose_items
from moeoffload.formats.file_format import FileFormat, Packing, Parts
from moeoffload.formats.int4 import pack_grouped

_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds its first row, its second row, and so on."""


def check(settings: Mapping[str, Any]) -> None:
    """Raises ValueError, in one line, for settings that are not supported."""
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise ValueError(f"awq with {str(bits)[:20]} bits; supported are 4")
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise ValueError(f"awq, version {version[:20]}; supported is gemm")
    if not settings.get("zero_point", True):
        raise ValueError("awq without zero points")


def pack(parts: Parts, settings: Mapping[str, Any]) -> Packing:
    """Returns how a weight in this module's layout is packed. Raises ValueError, in one line, if parts do not fit."""
    n_in, n_out = parts["weight"].shape[0], 8 * parts["weight"].shape[1]
    if n_in % 8:
        raise ValueError(f"its rows have {n_in} weights, needed is a multiple of 8")
    size = settings.get("group_size", settings.get("q_group_size", 128))
    return pack_grouped(parts, (n_out, n_in), size, _sections, with_zeros=True)


def _sections(parts: Parts) -> dict[str, torch.Tensor]:
    return {
        "codes": transpose_codes(parts["weight"], _PLACES),
        "scales": transpose_items(parts["scale"]),
        "offsets": split_zeros(parts["zeros"].t(), _PLACES),
    }


FILE_FORMATS: Final = (FileFormat(".qweight", (torch.int32,), {"scale": (".scales",), "zeros": (".qzeros",)}, pack),)
