"""AWQ, 4 bits: ``qweight`` (in, out / 8) int32, ``qzeros`` (groups, out / 8) int32, ``scales`` (groups, out).

A word holds eight neighbouring rows' weights in the order 0, 2, 4, 6, 1, 3, 5, 7; a weight is (code - zero) * scale.
Source: AutoAWQ ``modules/linear/gemm.py`` and ``utils/packing_utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from moeoffload.formats.file_format import FileFormat, Packing, Parts, as_bytes, check_shape
from moeoffload.formats.int4 import int4_format


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
    """As the module says."""
    n_in, n_out = parts["weight"].shape[0], 8 * parts["weight"].shape[1]
    size = settings.get("group_size", settings.get("q_group_size", 128))
    group = n_in if size == -1 else size
    if type(group) is not int or group < 1:
        raise ValueError(f"group_size is {str(size)[:20]}")
    n_groups = -(-n_in // group)
    check_shape("scales", parts["scale"], n_groups, n_out)
    check_shape("zeros", parts["zeros"], n_groups, n_out // 8)
    return Packing(int4_format(parts["scale"], group, with_zeros=True), (n_out, n_in), _sections)


def _sections(parts: Parts) -> dict[str, torch.Tensor]:
    zeros = torch.stack(_halves(parts["zeros"]), dim=-1)
    even, odd = parts["weight"][::2], parts["weight"][1::2]
    (low, high), (next_low, next_high) = _halves(even), _halves(odd)
    codes = torch.stack((low | next_low << 4, high | next_high << 4), dim=-1)
    return {"codes": _rows(codes), "scales": as_bytes(parts["scale"].t()), "offsets": _rows(zeros)}


def _halves(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, n) int32 -> the low and the high half of each byte, (rows, n, 4) uint8."""
    each = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    return each & 15, each >> 4


def _rows(columns: torch.Tensor) -> torch.Tensor:
    """(n, out / 8, bytes of a word, halves) -> (out, n) in the order of rows."""
    # Bytes 0 and 1 hold the even rows, 2 and 3 the odd ones: bits of b, and the half, are the bits of a row's number.
    n, n_words = columns.shape[:2]
    return columns.view(n, n_words, 2, 2, 2).permute(1, 3, 4, 2, 0).reshape(8 * n_words, n)


FILE_FORMATS: Final = (FileFormat(".qweight", (torch.int32,), {"scale": (".scales",), "zeros": (".qzeros",)}, pack),)
