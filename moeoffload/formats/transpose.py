"""Transposes codes, scales and zeros that files store as (in, out) to rows, (out, in), with the C library or torch."""

from __future__ import annotations

from typing import Final

import torch

from moeoffload.formats.conversion import convert
from moeoffload.formats.file_format import as_bytes

_MASKS: Final = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F))
IN_ORDER: Final = (0, 1, 2, 3, 4, 5, 6, 7)


def transpose_words(words: torch.Tensor) -> torch.Tensor:
    """Transposes (in / 8, out) int32, each word eight weights of an output row, to (out, bytes), contiguous."""
    n_words, n_out = words.shape
    made = convert("moe_transpose_words", words, (n_out, 4 * n_words), n_words, n_out, is_by_rows=False)
    return as_bytes(words.t()) if made is None else made


def transpose_codes(words: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """Transposes (in, out / 8) int32, each word one weight of eight rows, the i-th row in nibble ``places[i]``, to
    (out, bytes), contiguous, with the first weight in the lowest bits."""
    n_in, n_columns = words.shape
    shape, numbers = (8 * n_columns, n_in // 2), (n_in, n_columns, _nibbles(places))
    made = convert("moe_transpose_codes", words, shape, *numbers, is_by_rows=False)
    if made is not None:
        return made
    exchanged = _exchanged(words.unflatten(0, (-1, 8)))[:, places]  # (in / 8, 8, out / 8)
    return as_bytes(exchanged.permute(2, 1, 0).flatten(0, 1).contiguous())


def transpose_items(items: torch.Tensor) -> torch.Tensor:
    """Transposes (n, out) of any dtype to (out, bytes), contiguous."""
    (n, n_out), size = items.shape, items.itemsize
    made = convert("moe_transpose_items", items, (n_out, n * size), n, n_out, size, is_by_rows=False)
    return as_bytes(items.t()) if made is None else made


def split_zeros(words: torch.Tensor, places: tuple[int, ...] = IN_ORDER, more: int = 0) -> torch.Tensor:
    """Splits words of eight rows' zeros, (out / 8, groups) int32, contiguous or a transposed view, to (out, groups)
    uint8; ``places`` as in `transpose_codes`; ``more`` is added to each word before."""
    n, n_groups = words.shape
    is_by_rows = words.is_contiguous()
    stored, numbers = words if is_by_rows else words.t(), (n, n_groups, *words.stride(), more, _nibbles(places))
    made = convert("moe_split_zeros", stored, (8 * n, n_groups), *numbers, is_by_rows=is_by_rows)
    if made is not None:
        return made
    shifts = 4 * torch.tensor(places, dtype=torch.int32)[:, None]
    return (((words + more).unsqueeze(1) >> shifts) & 15).to(torch.uint8).flatten(0, 1)


def _nibbles(places: tuple[int, ...]) -> int:
    return sum(place << 4 * i for i, place in enumerate(places))


def _exchanged(words: torch.Tensor) -> torch.Tensor:
    """Exchanges nibble i of word k with nibble k of word i in (n, 8, m) int32, beginning with halves of words."""
    words = words.clone()
    for distance, mask in _MASKS:
        first, second = words.unflatten(1, (-1, 2, distance)).unbind(2)
        moved = (first >> 4 * distance ^ second) & mask
        second ^= moved
        first ^= moved << 4 * distance
    return words
