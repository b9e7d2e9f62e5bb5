"""Quantises experts while they are read, for ``--expert-format``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from moeoffload.checkpoint.convert import Recipe
from moeoffload.checkpoint.layout import per_expert_parameters
from moeoffload.checkpoint.packed_rows import Piece
from moeoffload.errors import ModelError
from moeoffload.formats import PackedFormat
from moeoffload.formats.quantise import quantise

_MOST_THREADS: Final = 8
"""Each has a group of experts in memory besides the result."""


def refuse_packed(path: Path, recipes: Mapping[str, Sequence[Recipe]], name: str) -> None:
    """Raises ModelError if experts are stored packed: quantising them again would lose more than one format does."""
    stored = sorted(
        {piece.form.name for each in recipes.values() for r in each for p in r.pieces.values() for piece in p}
    )
    if stored:
        raise ModelError(f"{path}: its experts are stored as {stored[0]}; they cannot be packed again as {name}")


def quantised_pieces(mould: nn.Module, form: PackedFormat) -> dict[str, tuple[Piece, ...]]:
    """Returns the matrices of an experts module in ``form``, by parameter name."""
    module: Any = mould
    pieces: dict[str, tuple[Piece, ...]] = {}
    for name, shape in per_expert_parameters(mould).items():
        if len(shape) == 3:
            n_out, n_in = (shape[2], shape[1]) if module.is_transposed else (shape[1], shape[2])
            pieces[name] = (Piece(form, n_out, n_in, ()),)
    return pieces


def quantised_experts(
    module: nn.Module, read: Callable[[Sequence[int]], nn.Module], groups: Sequence[Sequence[int]]
) -> nn.Module:
    """Fills ``module``, whose matrices are packed, with the experts of ``groups``; ``read`` returns them as stored.

    Sets its attribute ``weight_error``: the RMS error of the weights, divided by their RMS.
    """
    about: Any = module
    ends = list(itertools.accumulate(map(len, groups)))

    @torch.inference_mode()  # as the caller's may be, which belongs to its thread
    def fill(group: Sequence[int], end: int) -> tuple[float, float]:
        wrong = total = 0.0
        places = slice(end - len(group), end)
        for name, values in read(group).named_parameters():
            room = getattr(about, name, None) if "." not in name else None
            if not isinstance(room, tuple):
                target = module.get_parameter(name)
                (target[places] if target.shape != values.shape else target).copy_(values)
                continue
            rows = values.transpose(1, 2) if about.is_transposed else values
            packed, some_wrong, some_total = quantise(rows, room[0].format)
            for number in range(len(group)):
                room[0].put(places.start + number, packed.one(number))
            wrong, total = wrong + some_wrong, total + some_total
        return wrong, total

    with ThreadPoolExecutor(min(torch.get_num_threads(), _MOST_THREADS)) as pool:
        wrong, total = map(sum, zip(*pool.map(fill, groups, ends), strict=True))
    about.weight_error = (wrong / total) ** 0.5 if total else 0.0
    return module
