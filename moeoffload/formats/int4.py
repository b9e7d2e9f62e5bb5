"""Shared parts of the 4-bit integer formats: their levels, zeros and orders of groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from moeoffload.formats.file_format import FLOAT_SCALES, Packing, Parts, check_shape
from moeoffload.formats.packed import Codes, Offsets, PackedFormat, Scales

SIGNED: Final = tuple(float(level) for level in range(-8, 8))
UNSIGNED: Final = tuple(float(level) for level in range(16))
Sections = Callable[[Parts], dict[str, torch.Tensor]]


def check_groups(scale: torch.Tensor, group: int) -> Scales:
    """Returns how the scales of groups are stored. Raises ValueError for scales of another dtype, or a group size that
    is not a multiple of 16."""
    if scale.dtype not in FLOAT_SCALES:
        raise ValueError(f"its scales are stored as {scale.dtype}")
    if group % 16:
        raise ValueError(f"its groups have {group} weights, needed is a multiple of 16")
    return FLOAT_SCALES[scale.dtype]


def int4_format(scale: torch.Tensor, group: int, *, with_zeros: bool) -> PackedFormat:
    """Returns the format of 4-bit codes in which 8, or with ``with_zeros`` the group's zero, stands for the value 0.
    Raises ValueError as `check_groups` does."""
    scales = check_groups(scale, group)
    offsets, levels = (Offsets.ZERO, UNSIGNED) if with_zeros else (Offsets.NONE, SIGNED)
    return PackedFormat("int4", Codes.LEVELS4, scales, offsets, group, levels)


def pack_grouped(
    parts: Parts, shape: tuple[int, int], size: object, sections: Sections, *, with_zeros: bool
) -> Packing:
    """Returns how a weight of ``shape`` (out, in) with scales (groups, out) and zeros (groups, out / 8) is packed;
    ``size`` -1: one group. Raises ValueError, in one line, for a group size or parts that do not fit."""
    n_out, n_in = shape
    group = n_in if size == -1 else size
    if type(group) is not int or group < 1:
        raise ValueError(f"group_size is {str(size)[:20]}")
    n_groups = -(-n_in // group)
    check_shape("scales", parts["scale"], n_groups, n_out)
    check_zeros(parts["zeros"], n_groups, n_out // 8)
    form = int4_format(parts["scale"], group, with_zeros=with_zeros)
    return Packing(replace(form, group=0) if group == n_in else form, shape, sections)  # 0: one for a row


def check_zeros(zeros: torch.Tensor, *wanted: int) -> None:
    """Raises ValueError unless words of zeros are int32 and their last dimensions are ``wanted``."""
    check_shape("zeros", zeros, *wanted)
    if zeros.dtype is not torch.int32:
        raise ValueError(f"its zeros are stored as {zeros.dtype}")


def check_order(parts: Parts, group: int) -> None:
    """Raises ValueError if, according to ``g_idx``, the columns of a group are not neighbours."""
    order = parts.get("g_idx")
    if order is None or not order.numel():
        return
    groups = torch.arange(order.numel()) // (group or order.numel())
    if not torch.equal(order.long(), groups):
        raise ValueError("its columns are in the order of their activations (g_idx, desc_act); not supported")
