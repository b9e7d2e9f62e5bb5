"""What crosses to the servers is exactly what the wire format says, and no call is made that is not needed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import DEMO, demo_prompt, local_model

from moeoffload import OffloadedModel, open_model
from moeoffload.wire import HEADER_BYTES

ITEMSIZE = {"f32": 4, "f16": 2, "bf16": 2}


def prefill(offloaded: OffloadedModel, n_tokens: int) -> dict[str, Any]:
    """The prefill phase of the report after one forward pass over ``n_tokens`` random tokens."""
    prompt = torch.randint(5, 60, (1, n_tokens), generator=torch.manual_seed(2))
    offloaded.recorder.reset()
    with torch.inference_mode():
        offloaded.model(prompt, logits_to_keep=1)
    return offloaded.report().phases["prefill"]


@pytest.mark.parametrize(
    ("mode", "dtype", "n_rows"),
    [("batched", "f32", 300), ("batched", "f16", 300), ("batched", "bf16", 300), ("stream", "bf16", 4)],
)
def test_a_prefill_makes_the_calls_of_its_mode_and_exactly_the_bytes_of_the_format(
    three_servers: list[str], mode: str, dtype: str, n_rows: int
) -> None:
    n_tokens = 1000
    with open_model(
        DEMO, experts=three_servers[:1], mode=mode, dtype=dtype, batch_capacity=300, device="cpu"
    ) as offloaded:
        checkpoint = offloaded.checkpoint
        phase = prefill(offloaded, n_tokens)
    layers = len(checkpoint.layers)
    calls = layers * math.ceil(n_tokens / n_rows)
    values = checkpoint.hidden_size * ITEMSIZE[dtype]
    assert phase["calls"] == calls
    assert phase["rows"] == layers * n_tokens
    assert phase["bytes_out"] == calls * HEADER_BYTES + layers * n_tokens * (values + checkpoint.top_k * (4 + 2))
    assert phase["bytes_back"] == calls * HEADER_BYTES + layers * n_tokens * values


def test_rows_go_only_to_servers_that_hold_one_of_their_experts(three_servers: list[str]) -> None:
    with open_model(DEMO, experts=three_servers, mode="batched", device="cpu") as offloaded:
        routes: list[torch.Tensor] = []
        original = type(offloaded.dispatcher).__call__

        def spy(self: Any, layer: int, hidden: Any, ids: torch.Tensor, weights: Any) -> Any:
            routes.append(ids.clone())
            return original(self, layer, hidden, ids, weights)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(offloaded.dispatcher), "__call__", spy)
            prefill(offloaded, 40)
        report = offloaded.report()
        for link, server in zip(offloaded.links, report.servers, strict=True):
            wanted = [
                int(torch.isin(ids, torch.tensor(held)).any(dim=1).sum())
                for ids, held in zip(routes, link.table.layers, strict=True)
            ]
            assert server["phases"]["prefill"]["rows"] == sum(wanted)
            assert server["phases"]["prefill"]["calls"] == sum(rows > 0 for rows in wanted)


def test_a_server_none_of_whose_experts_are_chosen_gets_no_call(three_servers: list[str]) -> None:
    with open_model(DEMO, experts=three_servers[:2], mode="batched", device="cpu") as offloaded:
        first = offloaded.links[0]
        only_first = torch.tensor([first.table.layers[0][: offloaded.checkpoint.top_k]] * 5)
        hidden = torch.randn(5, offloaded.checkpoint.hidden_size, dtype=offloaded.checkpoint.dtype)
        offloaded.recorder.reset()
        with torch.inference_mode():
            offloaded.dispatcher(0, hidden, only_first, torch.rand(5, offloaded.checkpoint.top_k))
        counted = [server["phases"]["prefill"]["calls"] for server in offloaded.report().servers]
    assert counted == [1, 0]


def test_chunks_at_the_edges_of_the_cap_do_not_change_tokens(three_servers: list[str]) -> None:
    cap = 48
    options = {"max_new_tokens": 12, "do_sample": False}
    local = local_model(DEMO)
    with open_model(DEMO, experts=three_servers[:1], mode="batched", batch_capacity=cap, device="cpu") as offloaded:
        for n_tokens in (cap - 1, cap, cap + 1, 5 * cap + 3):
            prompt = demo_prompt(n_tokens, seed=3)
            assert torch.equal(offloaded.model.generate(prompt, **options), local.generate(prompt, **options))
            assert prefill(offloaded, n_tokens)["calls"] == len(offloaded.checkpoint.layers) * math.ceil(n_tokens / cap)
