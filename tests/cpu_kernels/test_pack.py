"""The compiled packer writes what torch would write, and finds what must not travel."""

from __future__ import annotations

import itertools

import pytest
import torch

from moeoffload import native
from moeoffload.kernels.pack import MAX_ROWS, RowPacker, encode_sums
from moeoffload.native import Features
from moeoffload.payload import PayloadDtype
from moeoffload.placement import slot_table
from moeoffload.wire import HEADER_BYTES, FrameLayout

from .experts import instruction_sets

HIDDEN, TOP_K, N_EXPERTS = 48, 3, 11
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def packer_for(source: torch.dtype, payload: torch.dtype) -> tuple[RowPacker, FrameLayout, bytearray]:
    code = PayloadDtype.from_torch(payload)
    layout = FrameLayout(HIDDEN, TOP_K, code, code, MAX_ROWS)
    frame = bytearray(layout.request_bytes)
    body = torch.frombuffer(frame, dtype=torch.uint8, offset=HEADER_BYTES).data_ptr()
    return RowPacker(body, source, payload, hidden=HIDDEN, top_k=TOP_K), layout, frame


def a_call(n_rows: int, source: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.manual_seed(seed)
    hidden = (torch.randn(n_rows, HIDDEN, generator=generator) * 3).to(source)
    ids = torch.stack([torch.randperm(N_EXPERTS, generator=generator)[:TOP_K] for _ in range(n_rows)])
    return hidden, ids, torch.rand(n_rows, TOP_K, generator=generator)


@pytest.mark.parametrize(("source", "payload"), itertools.product(FLOATS, FLOATS))
@pytest.mark.parametrize("held", [range(N_EXPERTS), (4,), (0, 3, 9), ()])
@pytest.mark.parametrize("weights_dtype", ["float32", "source"])
def test_rows_weights_and_slots_are_those_of_torch(
    source: torch.dtype, payload: torch.dtype, held: tuple[int, ...], weights_dtype: str
) -> None:
    packer, layout, frame = packer_for(source, payload)
    table = slot_table(held, N_EXPERTS)
    for n_rows in (1, 2, 7, MAX_ROWS):
        hidden, ids, weights = a_call(n_rows, source, n_rows)
        weights = weights if weights_dtype == "float32" else weights.to(source)
        assert packer.takes(hidden, ids, weights)
        index = packer.pack(hidden, ids, weights, table, holds_all=len(held) == N_EXPERTS)
        hit = (table[ids] >= 0).any(dim=1).nonzero().squeeze(1)
        assert packer.n_rows == len(hit)
        assert packer.bad_row is None
        if not len(hit):
            continue
        assert (index is None) == (len(hit) == n_rows)
        assert torch.equal(hit if index is None else index, hit)
        views = layout.dispatch_views(memoryview(frame), len(hit))
        assert torch.equal(views.rows, hidden[hit].to(payload))
        assert torch.equal(views.weights, weights[hit].float())
        assert torch.equal(views.slots, table[ids][hit])


@pytest.mark.parametrize(
    ("source", "payload", "value"),
    [
        *((source, payload, bad) for source in FLOATS for payload in FLOATS for bad in (float("nan"), float("inf"))),
        (torch.float32, torch.float16, 65520.0),
        (torch.bfloat16, torch.float16, -70000.0),
        (torch.float32, torch.bfloat16, -3.4e38),
    ],
)
def test_a_row_that_is_not_finite_in_the_payload_dtype_is_named(
    source: torch.dtype, payload: torch.dtype, value: float
) -> None:
    packer, _, _ = packer_for(source, payload)
    hidden, ids, weights = a_call(5, source)
    hidden[3, 17] = value
    packer.pack(hidden, ids, weights, slot_table(range(N_EXPERTS), N_EXPERTS), holds_all=True)
    assert packer.bad_row == 3


def test_the_largest_numbers_of_a_payload_dtype_are_fine() -> None:
    for payload in FLOATS:
        packer, layout, frame = packer_for(torch.float32, payload)
        hidden, ids, weights = a_call(1, torch.float32)
        hidden[0, 5] = -torch.finfo(payload).max
        packer.pack(hidden, ids, weights, slot_table(range(N_EXPERTS), N_EXPERTS), holds_all=True)
        assert packer.bad_row is None
        assert layout.dispatch_views(memoryview(frame), 1).rows[0, 5] == -torch.finfo(payload).max


@pytest.mark.parametrize("wrong", [-1, N_EXPERTS, 2**40])
def test_an_id_that_no_expert_has_is_an_error_and_reads_nothing(wrong: int) -> None:
    packer, _, _ = packer_for(torch.bfloat16, torch.bfloat16)
    hidden, ids, weights = a_call(4, torch.bfloat16)
    ids[2, 1] = wrong
    with pytest.raises(IndexError, match="there are 11"):
        packer.pack(hidden, ids, weights, slot_table((1, 2), N_EXPERTS), holds_all=False)


def test_what_it_is_not_made_for_is_left_to_torch() -> None:
    packer, _, _ = packer_for(torch.bfloat16, torch.bfloat16)
    hidden, ids, weights = a_call(4, torch.bfloat16)
    assert packer.takes(hidden, ids, weights)
    assert not packer.takes(hidden.float(), ids, weights)
    assert not packer.takes(hidden, ids, weights.double())
    assert not packer.takes(hidden.t().contiguous().t(), ids, weights)
    assert not packer.takes(hidden, ids.t().contiguous().t(), weights)
    assert not packer.takes(*a_call(MAX_ROWS + 1, torch.bfloat16))


@pytest.mark.parametrize("features", instruction_sets(), ids=str)
@pytest.mark.parametrize("payload", FLOATS)
def test_sums_of_all_sizes_are_rounded_as_torch_rounds_them(
    payload: torch.dtype, features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "cpu_features", lambda: features)
    values = torch.randn(MAX_ROWS, 4099, generator=torch.manual_seed(0)) * torch.logspace(-9, 4, 4099)
    halfway = torch.arange(1, 2049) * 2.0**-25  # between two subnormal numbers of float16
    for sums in (values, -values, halfway.view(1, -1), values[:, :1].clone(), values[:, :31].clone()):
        out = torch.empty(sums.shape, dtype=payload)
        assert encode_sums(sums, out) is None
        assert torch.equal(out, sums.to(payload))


@pytest.mark.parametrize(
    ("payload", "value"),
    [
        *((payload, bad) for payload in FLOATS for bad in (float("nan"), float("inf"), -float("inf"))),
        (torch.float16, 65520.0),
    ],
)
def test_the_first_sum_that_does_not_fit_is_named_and_the_rest_written(payload: torch.dtype, value: float) -> None:
    sums = torch.ones(4, 40)
    sums[1, 39] = sums[3, 0] = value
    out = torch.zeros(4, 40, dtype=payload)
    assert encode_sums(sums, out) == 1
    assert torch.equal(out[2], sums[2].to(payload))
