"""Parameters in huge pages: the same parameters with the same values, only where the system has the room."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from moeoffload.kernels import huge_pages
from moeoffload.kernels.huge_pages import move_to_huge_pages

MIB = 1 << 20
has_them = huge_pages._system_has_huge_pages()
needs_huge_pages = pytest.mark.skipif(not has_them, reason="this system gives nobody huge pages")


def parameter(n_mib: float, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    n = int(n_mib * MIB) // dtype.itemsize
    return nn.Parameter(torch.randn(n // 64, 64, generator=torch.manual_seed(n)).to(dtype))


@needs_huge_pages
def test_large_parameters_move_and_keep_their_values_and_identity() -> None:
    parameters = [parameter(5), parameter(2, torch.float32), parameter(0.5), nn.Parameter(parameter(4).data.T)]
    values, places = [each.data.clone() for each in parameters], [each.data_ptr() for each in parameters]
    tied = parameters[0]
    assert move_to_huge_pages([*parameters, tied]) == 7 * MIB
    assert tied is parameters[0]
    for each, value in zip(parameters, values, strict=True):
        assert torch.equal(each.data, value)
        assert each.dtype == value.dtype
        assert each.stride() == value.stride() or not each.is_contiguous()
    moved = [each.data_ptr() != place for each, place in zip(parameters, places, strict=True)]
    assert moved == [True, True, False, False]
    assert all(each.data_ptr() % (2 * MIB) == 0 for each in parameters[:2])


def resident_bytes() -> int:
    """What this process holds of files."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssFile:")) << 10


@needs_huge_pages
def test_what_was_mapped_from_a_file_is_not_held_twice(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    expected = parameter(64).data
    save_file({"weight": expected}, file)
    with safe_open(file, "pt") as mapped:
        weight = nn.Parameter(mapped.get_tensor("weight"))
    alias = weight.data
    assert torch.equal(alias, expected)  # read, therefore resident
    before = resident_bytes()
    assert move_to_huge_pages([weight]) == 64 * MIB
    assert before - resident_bytes() > 60 * MIB
    assert torch.equal(weight.data, expected)
    assert torch.equal(alias, expected)


@needs_huge_pages
def test_what_was_written_to_a_mapped_file_is_not_lost(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(8 * MIB))
    mapped = torch.from_file(str(file), shared=False, size=4 * MIB, dtype=torch.bfloat16)  # written to privately
    mapped[123] = 3.0
    weight = nn.Parameter(mapped)
    assert move_to_huge_pages([weight]) == 8 * MIB
    assert mapped[123] == weight.data[123] == 3.0


@needs_huge_pages
def test_nothing_moves_where_there_is_too_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    only = parameter(4)
    place = only.data_ptr()
    monkeypatch.setattr(huge_pages, "free_now", lambda device: 7 * MIB)
    assert move_to_huge_pages([only]) == 0
    assert only.data_ptr() == place


def test_nothing_moves_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_system_has_huge_pages", lambda: False)
    only = parameter(4)
    place = only.data_ptr()
    assert move_to_huge_pages([only]) == 0
    assert only.data_ptr() == place
