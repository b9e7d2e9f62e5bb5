"""Weights in huge pages: where the system has them, and of the right shape, dtype and place everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from moeoffload import huge_pages
from moeoffload.checkpoint.tensors import TensorIndex, TensorReader
from moeoffload.huge_pages import empty_weights

MIB = 1 << 20
SYSTEM_SAYS = Path("/sys/kernel/mm/transparent_hugepage/enabled")
has_them = SYSTEM_SAYS.exists() and "[never]" not in SYSTEM_SAYS.read_text()


def in_huge_pages() -> int:
    """Bytes of this process that are in huge pages."""
    found = re.search(r"AnonHugePages:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_large_tensors_begin_with_a_page_and_small_ones_are_ordinary(dtype: torch.dtype) -> None:
    for shape in ((3 * MIB,), (2, MIB, 3), (5, 7), (0, 4)):
        weights = empty_weights(shape, dtype)
        assert weights.shape == shape
        assert weights.dtype == dtype
        assert weights.is_contiguous()
        assert weights.nbytes < 2 * MIB or weights.data_ptr() % (2 * MIB) == 0
        weights.fill_(1)


@pytest.mark.skipif(not has_them, reason="this system has no huge pages")
def test_what_is_read_of_a_checkpoint_lies_in_them(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    expected = torch.randint(0, 255, (64, MIB), dtype=torch.uint8)
    save_file({"weight": expected}, tmp_path / "model.safetensors")
    before = in_huge_pages()
    with TensorReader() as reader:
        weight = reader.read(TensorIndex.open(tmp_path)["weight"])
    assert in_huge_pages() - before >= 32 * MIB  # the system may have no room for all
    assert torch.equal(weight, expected)


def test_a_system_without_them_gives_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_madvise", lambda: None)
    assert empty_weights((4, MIB), torch.bfloat16).shape == (4, MIB)
