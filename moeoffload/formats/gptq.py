"""GPTQ, 4 bits: ``qweight`` (in / 8, out) int32, ``qzeros`` (groups, out / 8) int32, ``scales`` (groups, out).

A word holds eight neighbouring weights of a column, the first in the lowest bits; a weight is (code - zero) * scale.
Files of the first version (``checkpoint_format`` "gptq") hold words of zeros less 0x11111111: a zero of 0 borrows from
the next one. Sources: AutoGPTQ ``qlinear_cuda_old.py``,
GPTQModel ``utils/model.py`` (``convert_gptq_v1_to_v2_format``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch

from moeoffload.formats.conversion import split_zeros, transpose_items
from moeoffload.formats.file_format import FileFormat, Packing, Parts
from moeoffload.formats.int4 import check_order, pack_grouped

_SMALLER_BY: Final = {"gptq": 0x11111111, "gptq_v2": 0}
_MIDDLE: Final = 8
_MIDDLES: Final = 0x88888888 - (1 << 32)  # a word of them, as int32


def check(settings: Mapping[str, Any]) -> None:
    """Raises ValueError, in one line, for settings that are not supported."""
    if settings.get("bits") != 4:
        raise ValueError(f"gptq with {str(settings.get('bits'))[:20]} bits; supported are 4")
    # The columns of a group are neighbours nevertheless if it is the whole row, or was chosen before they were sorted.
    if settings.get("desc_act") and settings.get("group_size") != -1 and not settings.get("static_groups"):
        raise ValueError("gptq with desc_act: columns in the order of their activations")
    if _version(settings) not in _SMALLER_BY:
        raise ValueError(f"gptq with checkpoint_format {_version(settings)[:40]}; known are {', '.join(_SMALLER_BY)}")


def _version(settings: Mapping[str, Any]) -> str:
    return str(settings.get("checkpoint_format") or "gptq")


def pack(parts: Parts, settings: Mapping[str, Any]) -> Packing:
    """Returns how a weight in this module's layout is packed; with ``sym`` all zeros are 8 and are not kept.
    Raises ValueError, in one line, if parts do not fit."""
    n_in, n_out = 8 * parts["weight"].shape[0], parts["weight"].shape[1]
    if n_out % 8:
        raise ValueError(f"it has {n_out} rows, needed is a multiple of 8")
    size = settings.get("group_size", 128)
    is_symmetric = settings.get("sym") is True
    less = _SMALLER_BY[_version(settings)]
    group = n_in if size == -1 else size
    sections = partial(_sections, group=group, less=less, is_symmetric=is_symmetric)
    return pack_grouped(parts, (n_out, n_in), size, sections, with_zeros=not is_symmetric)


def _sections(parts: Parts, *, group: int, less: int, is_symmetric: bool) -> dict[str, torch.Tensor]:
    check_order(parts, group)
    sections = {"codes": transpose_items(parts["weight"]), "scales": transpose_items(parts["scale"])}
    if not is_symmetric:
        sections["offsets"] = split_zeros(parts["zeros"].t(), more=less)
    elif not bool((parts["zeros"] + less == _MIDDLES).all()):
        raise ValueError(f"the config says symmetric (sym), but not all of its zeros are {_MIDDLE}")
    return sections


FILE_FORMATS: Final = (
    FileFormat(
        ".qweight",
        (torch.int32,),
        {"scale": (".scales",), "zeros": (".qzeros",), "g_idx": (".g_idx",)},
        pack,
        optional=frozenset({"g_idx"}),
    ),
)
