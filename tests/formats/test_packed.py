"""What files claim about groups costs no memory."""

from __future__ import annotations

import resource

import torch

from moeoffload.formats import Codes, PackedFormat, PackedWeights, Scales


def test_a_group_far_longer_than_a_row_takes_no_memory_of_its_length() -> None:
    form = PackedFormat("fp8", Codes.FP8, Scales.F32, group=1 << 40, shared_rows=1 << 40)
    packed = PackedWeights.empty(form, 1, 3, 32, torch.device("cpu"))
    packed.data.fill_(0x38)  # 1.0
    assert packed.scales is not None
    packed.scales.fill_(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert torch.equal(packed.unpack(torch.float32), torch.full((1, 3, 32), 2.0))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
