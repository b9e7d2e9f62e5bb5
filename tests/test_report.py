"""The report says what happened: its parts add up, and its fields are the documented ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import DEMO, ROOT, demo_prompt

from moeoffload import open_model


def leaves(data: Any) -> Iterator[str]:
    """Names of all fields below ``data``."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield name
            yield from leaves(value)
    elif isinstance(data, list) and data:
        yield from leaves(data[0])


@pytest.mark.parametrize("pipeline", ["off", "on"])
def test_the_parts_of_both_phases_add_up_to_their_time(three_servers: list[str], pipeline: str) -> None:
    with open_model(
        DEMO, experts=three_servers[:2], pipeline=pipeline, local_experts_gib=1e-4, profile=True, device="cpu"
    ) as offloaded:
        offloaded.model.generate(demo_prompt(800, seed=1), max_new_tokens=40, min_new_tokens=40, do_sample=False)
        report = offloaded.report().to_json()
    assert report["prompt_tokens"] == 800
    assert report["completion_tokens"] == 40
    for name in ("prefill", "decode"):
        phase = report["phases"][name]
        assert phase["complete"]
        assert 0.95 <= phase["accounted"] <= 1.01
        host = phase["host"]
        assert host["wait_s"] == pytest.approx(host["wait_wire_s"] + host["wait_queue_s"] + host["wait_compute_s"])
        servers = [server["phases"][name] for server in report["servers"]]
        for figure in ("calls", "rows", "bytes_out", "bytes_back"):
            assert phase[figure] == sum(server[figure] for server in servers) > 0
        layers = report["layers"][name]
        assert len(layers) == report["model"]["moe_layers"]
        assert sum(layer["wait_s"] for layer in layers) == pytest.approx(host["wait_s"])
    assert report["phases"]["prefill"]["pipelined"] == (pipeline == "on")


def test_every_field_is_documented(three_servers: list[str]) -> None:
    text = (ROOT / "docs" / "report.md").read_text()
    with open_model(DEMO, experts=three_servers[:1], profile=True, device="cpu") as offloaded, torch.inference_mode():
        offloaded.model(torch.tensor([[7, 8, 9]]))
        data = json.loads(json.dumps(offloaded.report().to_json()))
    documented = set(re.findall(r"[a-z_]+", text))
    assert {name for name in leaves(data) if name not in documented} == set()
