"""Turning matrices of 4-bit codes: the C library and torch give the same words, those that the layout says."""

from __future__ import annotations

import itertools

import pytest
import torch

from moeoffload.formats import conversion

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@pytest.mark.parametrize("shape", [(8, 1), (64, 5), (24, 17), (256, 96), (136, 40)])
@pytest.mark.parametrize("library", [True, False], ids=["C", "torch"])
def test_codes_of_columns_become_rows(shape: tuple[int, int], library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not library:
        monkeypatch.setattr(conversion, "_library", lambda: None)
    words = torch.randint(-(1 << 31), 1 << 31, shape, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    assert torch.equal(conversion.transpose_words(words).view(torch.int32), words.t())
    shifts = torch.arange(8, dtype=torch.int64) * 4
    codes = (words.long().unsqueeze(-1) >> shifts & 15)[..., list(PLACES)].flatten(1)  # (in, out)
    rows = codes.t().unflatten(1, (-1, 8))
    wanted = (rows << shifts).sum(dim=-1)
    assert torch.equal(conversion.transpose_codes(words, PLACES).view(torch.int32).long() & 0xFFFFFFFF, wanted)


@pytest.mark.parametrize("shape", [(1, 1), (16, 5), (3, 17)])
@pytest.mark.parametrize("library", [True, False], ids=["C", "torch"])
def test_scales_and_zeros_of_columns_become_rows(
    shape: tuple[int, int], library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not library:
        monkeypatch.setattr(conversion, "_library", lambda: None)
    words = torch.randint(-(1 << 31), 1 << 31, shape, generator=torch.Generator().manual_seed(2)).to(torch.int32)
    for dtype in (torch.uint8, torch.float16, torch.float32):
        scales = words.to(dtype)
        assert torch.equal(conversion.transpose_items(scales).view(dtype), scales.t())
    more = 0x11111111
    for stored in (words, words.t()):
        zeros = conversion.split_zeros(stored, PLACES, more)
        for row, group in itertools.product(range(8 * stored.shape[0]), range(stored.shape[1])):
            word = (int(stored[row // 8, group]) + more) & 0xFFFFFFFF
            assert zeros[row, group] == word >> 4 * PLACES[row % 8] & 15
