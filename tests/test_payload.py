"""Payload dtypes: lossless where they can be, and an error instead of a clamp where they cannot."""

from __future__ import annotations

import pytest
import torch
from conftest import DEMO

from moeoffload import open_model
from moeoffload.errors import PayloadError
from moeoffload.payload import PayloadDtype, encode_rows, first_bad_row


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
        width, top_k = offloaded.checkpoint.hidden_size, offloaded.checkpoint.top_k
        n_rows = 30
        hidden = torch.randn(n_rows, width)
        ids = torch.stack([torch.randperm(32)[:top_k] for _ in range(n_rows)])
        weights = torch.rand(n_rows, top_k)
        call = offloaded.dispatcher.for_layer(2)
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
