"""Hot experts on the host: the same tokens, fewer rows sent, chosen from routing statistics."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from command_lines import Commands, one_line_error
from conftest import DEMO, demo_prompt, local_model

from moeoffload import open_model

PROMPTS = "add 12 30 =\nreverse hello =\nsort kitchen =\n"


def expert_gib(n_experts: int) -> float:
    return n_experts * 3 * 128 * 64 * 2 / (1 << 30)


def test_experts_on_the_host_give_the_same_tokens(three_servers: list[str]) -> None:
    n_local = 40
    prompt = demo_prompt(200, seed=5)
    expected = local_model(DEMO).generate(prompt, max_new_tokens=12, do_sample=False)
    with open_model(
        DEMO, experts=three_servers[:2], local_experts_gib=expert_gib(n_local) * 1.001, device="cpu"
    ) as offloaded:
        assert torch.equal(offloaded.model.generate(prompt, max_new_tokens=12, do_sample=False), expected)
        report = offloaded.report()
        assert sum(server["n_experts"] for server in report.servers) == 128 - n_local
        assert report.phases["prefill"]["local_rows"] > 0


def test_a_host_that_holds_every_expert_needs_no_server() -> None:
    prompt = demo_prompt(60, seed=6)
    expected = local_model(DEMO).generate(prompt, max_new_tokens=12, do_sample=False)
    with open_model(DEMO, local_experts_gib=1, device="cpu") as offloaded:
        assert offloaded.links == []
        assert torch.equal(offloaded.model.generate(prompt, max_new_tokens=12, do_sample=False), expected)


def test_rows_that_need_only_local_experts_are_not_sent(three_servers: list[str]) -> None:
    prompt = demo_prompt(400, seed=7)
    sent = {}
    for n_local in (0, 64, 120):
        with (
            open_model(
                DEMO, experts=three_servers[:1], local_experts_gib=expert_gib(n_local) * 1.001, device="cpu"
            ) as offloaded,
            torch.inference_mode(),
        ):
            offloaded.model(prompt, logits_to_keep=1)
            sent[n_local] = offloaded.report().phases["prefill"]["rows"]
            chosen = offloaded.links[0].table
    assert sent[0] == 400 * 4 > sent[64] > sent[120]
    assert chosen.n_experts == 8


def test_profile_refuses_a_folder_as_its_output_before_it_opens_the_model(commands: Commands, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPTS)
    done = commands.run("moeoffload", "profile", tmp_path / "no-model", "--prompts", prompts, "--output", tmp_path)
    assert f"--output: {tmp_path} cannot be written" in one_line_error(done, 2)


def test_profile_counts_routes_and_the_most_used_experts_stay(
    three_servers: list[str], commands: Commands, tmp_path: Path
) -> None:
    prompts, stats = tmp_path / "prompts.txt", tmp_path / "stats.json"
    prompts.write_text(PROMPTS)
    options = ["--experts", three_servers[0], "--max-new-tokens", "10", "--device", "cpu"]
    result = commands.run("moeoffload", "profile", DEMO, "--prompts", prompts, "--output", stats, *options)
    assert result.code == 0, result.err
    counts = json.loads(stats.read_text())["counts"]
    assert len({sum(layer) for layer in counts}) == 1
    hottest = sorted(((-count, layer, e) for layer, each in enumerate(counts) for e, count in enumerate(each)))[:10]
    with open_model(
        DEMO, experts=three_servers[:1], local_experts_gib=expert_gib(10) * 1.001, routing_stats=stats, device="cpu"
    ) as offloaded:
        remote = offloaded.links[0].table
        assert all(expert not in remote.layers[layer] for _, layer, expert in hottest)
