"""Turning matrices of 4-bit codes: the C library and torch give the same words, those that the layout says."""

from __future__ import annotations

import pytest
import torch

from moeoffload.formats import transpose

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@pytest.mark.parametrize("shape", [(8, 1), (64, 5), (24, 17), (256, 96), (136, 40)])
@pytest.mark.parametrize("library", [True, False], ids=["C", "torch"])
def test_codes_of_columns_become_rows(shape: tuple[int, int], library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not library:
        monkeypatch.setattr(transpose, "_function", lambda: None)
    words = torch.randint(-(1 << 31), 1 << 31, shape, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    assert torch.equal(transpose.transpose_words(words), words.t())
    shifts = torch.arange(8, dtype=torch.int64) * 4
    codes = (words.long().unsqueeze(-1) >> shifts & 15)[..., list(PLACES)].flatten(1)  # (in, out)
    rows = codes.t().unflatten(1, (-1, 8))
    wanted = (rows << shifts).sum(dim=-1)
    assert torch.equal(transpose.transpose_codes(words, PLACES).long() & 0xFFFFFFFF, wanted)
