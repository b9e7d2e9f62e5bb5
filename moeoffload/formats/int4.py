"""What the formats of 4-bit integers share: their levels, zeros and orders of groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from moeoffload.formats.file_format import Packing, Parts, check_shape
from moeoffload.formats.packed import Codes, Offsets, PackedFormat, Scales

SIGNED: Final = tuple(float(level) for level in range(-8, 8))
UNSIGNED: Final = tuple(float(level) for level in range(16))
Sections = Callable[[Parts], dict[str, torch.Tensor]]
SCALES: Final = {torch.float16: Scales.F16, torch.bfloat16: Scales.BF16, torch.float32: Scales.F32}


def int4_format(scale: torch.Tensor, group: int, *, with_zeros: bool) -> PackedFormat:
    """4-bit codes: 8 stands for 0, or the group's zero does. Raises ValueError for scales or groups of other kinds."""
    if scale.dtype not in SCALES:
        raise ValueError(f"its scales are stored as {scale.dtype}")
    if group % 16:
        raise ValueError(f"its groups have {group} weights, needed is a multiple of 16")
    offsets, levels = (Offsets.ZERO, UNSIGNED) if with_zeros else (Offsets.NONE, SIGNED)
    return PackedFormat("int4", Codes.LEVELS4, SCALES[scale.dtype], offsets, group, levels)


def pack_grouped(
    parts: Parts, shape: tuple[int, int], size: object, sections: Sections, *, with_zeros: bool
) -> Packing:
    """A weight of ``shape`` (out, in) with scales (groups, out) and zeros (groups, out / 8); ``size`` -1: one group.
    Raises ValueError, in one line, for a group size or parts that do not fit."""
    n_out, n_in = shape
    group = n_in if size == -1 else size
    if type(group) is not int or group < 1:
        raise ValueError(f"group_size is {str(size)[:20]}")
    n_groups = -(-n_in // group)
    check_shape("scales", parts["scale"], n_groups, n_out)
    check_shape("zeros", parts["zeros"], n_groups, n_out // 8)
    return Packing(int4_format(parts["scale"], group, with_zeros=with_zeros), shape, sections)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """(rows, n) uint8 -> (rows, 2 * n) uint8 of 0 to 15, low halves first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def check_order(parts: Parts, group: int) -> None:
    """Raises ValueError if ``g_idx`` says that the columns of a group are not neighbours."""
    order = parts.get("g_idx")
    if (
        order is not None
        and order.numel()
        and not torch.equal(
            order.long(), torch.arange(order.numel()) // group if group else torch.zeros_like(order, dtype=torch.int64)
        )
    ):
        raise ValueError("its columns are in the order of their activations (g_idx, desc_act); not supported")
