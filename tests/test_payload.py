"""Payload dtypes: lossless where they can be, close in 8 bits, and an error instead of a clamp."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from conftest import DEMO
from models import answers, demo_inputs, percent_right, random_call

from moeoffload import open_model
from moeoffload.errors import MoeOffloadError, PayloadError
from moeoffload.payload import F8_GROUP, PayloadDtype, encode_rows, first_bad_row, load_rows, store_rows


@pytest.mark.parametrize("payload", [each for each in PayloadDtype if each is not PayloadDtype.F8])
def test_rows_of_the_same_dtype_travel_without_loss(payload: PayloadDtype) -> None:
    source = torch.randn(5, 64).to(payload.torch_dtype)
    target = torch.empty_like(source)
    encode_rows(source, target, payload, where=str)
    assert torch.equal(source, target)


@pytest.mark.parametrize(
    ("payload", "value", "words"),
    [
        *(
            (payload, bad, "holds a value that is not finite")
            for payload in PayloadDtype
            for bad in (float("nan"), float("inf"), -float("inf"))
        ),
        (PayloadDtype.F16, 70_000, "holds 70000, beyond the range of f16"),
    ],
)
def test_values_that_cannot_travel_are_named_with_their_row(payload: PayloadDtype, value: float, words: str) -> None:
    source, target = torch.randn(7, 64), torch.empty(7, payload.columns(64), dtype=payload.torch_dtype)
    source[4, 63] = value
    with pytest.raises(PayloadError, match=f"row 4: hidden states {words}"):
        encode_rows(source, target, payload, where=lambda row: f"row {row}")


def test_large_finite_rows_pass_though_their_sum_overflows() -> None:
    encode_rows(torch.full((3, 8), 7e4), torch.empty(3, 8, dtype=torch.bfloat16), PayloadDtype.BF16, where=str)
    rows = torch.full((2, 64), torch.finfo(torch.float32).max)
    assert first_bad_row(rows) is None
    assert first_bad_row(torch.empty(0, 8)) is None


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_run_names_layer_and_row_of_what_cannot_travel_and_goes_on(three_servers: list[str], transport: str) -> None:
    with open_model(
        DEMO, experts=three_servers[:2], transport=transport, dtype="f16", model_dtype="f32", device="cpu"
    ) as offloaded:
        hidden, ids, weights = random_call(offloaded.checkpoint, 30)
        call = functools.partial(offloaded.dispatcher, 2)
        with torch.inference_mode():
            expected = call(hidden, ids, weights)
            for value, words in (
                (1e6, "hidden states holds 1e\\+06, beyond the range of f16"),
                (float("nan"), "finite"),
            ):
                broken = hidden.clone()
                broken[17, 5] = value
                with pytest.raises(PayloadError, match=f"layer 2, row 17: .*{words}"):
                    call(broken, ids, weights)
            huge = weights.clone()
            huge[21] = 1e9
            with pytest.raises(PayloadError, match=r"layer 2, row 21: expert output .*f16"):
                call(hidden, ids, huge)
            # What was in flight when it failed must not disturb what comes after.
            assert torch.equal(call(hidden, ids, weights), expected)


@pytest.mark.parametrize("hidden", [2048, 130, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_come_back_as_close_as_8_bits_are(hidden: int, dtype: torch.dtype) -> None:
    rows = torch.randn(9, hidden, generator=torch.manual_seed(0)).to(dtype)
    rows[1], rows[2, :2], rows[3] = 0, 1e4, rows[3] * 1e-30
    stored = torch.empty(9, PayloadDtype.F8.columns(hidden), dtype=torch.uint8)
    assert store_rows(rows, stored) is None
    back = torch.empty(9, hidden)
    load_rows(stored, back)
    for start in range(0, hidden, F8_GROUP):
        group = rows[:, start : start + F8_GROUP].float()
        error = (back[:, start : start + F8_GROUP] - group).abs()
        # Half of the last of three binary places, or of the least number that the group's scale leaves.
        assert (error <= (group.abs() / 16).maximum(group.abs().amax(1, keepdim=True) / 448 / 1024)).all()
    rows[5, 0] = torch.inf
    assert store_rows(rows, stored) == 5


@pytest.mark.parametrize(("back", "transport"), [("auto", "shared"), ("bf16", "stream")])
def test_the_demo_solves_its_tasks(back: str, transport: str, three_servers: list[str]) -> None:
    both: dict[str, Any] = {"experts": three_servers[:2], "device": "cpu", "transport": transport}
    with open_model(DEMO, **both) as offloaded:
        expected = answers(offloaded.model, demo_inputs())
        full = offloaded.report().to_json()["phases"]["prefill"]
    with open_model(DEMO, dtype="f8", dtype_back=back, **both) as offloaded:
        found = answers(offloaded.model, demo_inputs())
        report = offloaded.report().to_json()
    assert report["run"]["payload_dtype"] == ("f8" if back == "auto" else "f8 out, bf16 back")
    assert report["phases"]["prefill"]["bytes_out"] < 0.75 * full["bytes_out"]
    assert percent_right(found) >= 95
    assert sum(one != other for one, other in zip(found, expected, strict=True)) <= 6


def test_a_value_that_is_not_finite_is_an_error(three_servers: list[str]) -> None:
    with open_model(DEMO, experts=three_servers[:1], device="cpu", dtype="f8") as offloaded, torch.no_grad():
        offloaded.model.model.layers[0].post_attention_layernorm.weight[3] = torch.inf
        with pytest.raises(MoeOffloadError, match=r"layer 0, row 0.*not finite"):
            offloaded.model(torch.tensor([[5, 6, 7]]))
