"""Experts that the host computes: hot ones by routing statistics, shared ones while servers compute."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import Commands, one_line_error
from conftest import DEMO, demo_prompt, local_model, no_collection
from synthetic import TINY_FAMILIES, tiny_config, write_tiny
from torch import nn
from transformers import AutoModelForCausalLM

from moeoffload import open_model
from moeoffload.host import shared_experts
from moeoffload.host.link import ExpertLink
from moeoffload.host.shared_experts import overlap_shared_experts

PROMPTS = "add 12 30 =\nreverse hello =\nsort kitchen =\n"


def expert_gib(n_experts: int) -> float:
    return n_experts * 3 * 128 * 64 * 2 / (1 << 30)


def test_experts_on_the_host_give_the_same_tokens_and_if_all_are_no_server_is_needed(three_servers: list[str]) -> None:
    prompt = demo_prompt(200, seed=5)
    expected = local_model(DEMO).generate(prompt, max_new_tokens=12, do_sample=False)
    for n_local, servers in ((40, three_servers[:2]), (128, [])):
        gib = expert_gib(n_local) * 1.001
        with open_model(DEMO, experts=servers, local_experts_gib=gib, device="cpu") as offloaded:
            assert torch.equal(offloaded.model.generate(prompt, max_new_tokens=12, do_sample=False), expected)
            report = offloaded.report()
            assert len(offloaded.links) == len(servers)
            assert sum(server["n_experts"] for server in report.servers) == 128 - n_local
            assert report.phases["prefill"]["local_rows"] > 0


@torch.inference_mode()
def test_rows_that_need_only_local_experts_are_not_sent(three_servers: list[str]) -> None:
    prompt = demo_prompt(400, seed=7)
    sent = {}
    for n_local in (0, 64, 120):
        gib = expert_gib(n_local) * 1.001
        with open_model(DEMO, experts=three_servers[:1], local_experts_gib=gib, device="cpu") as offloaded:
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
    words: list[str | Path] = ["--prompts", prompts, "--output", stats, "--report", tmp_path / "r"]
    words += ["--experts", three_servers[0], "--max-new-tokens", "10", "--device", "cpu"]
    result = commands.run("moeoffload", "profile", DEMO, *words)
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "r").read_text())["phases"]["decode"]["tokens"] > 0
    counts = json.loads(stats.read_text())["counts"]
    assert len({sum(layer) for layer in counts}) == 1
    hottest = sorted(((-count, layer, e) for layer, each in enumerate(counts) for e, count in enumerate(each)))[:10]
    with open_model(
        DEMO, experts=three_servers[:1], local_experts_gib=expert_gib(10) * 1.001, routing_stats=stats, device="cpu"
    ) as offloaded:
        remote = offloaded.links[0].table
        assert all(expert not in remote.layers[layer] for _, layer, expert in hottest)


WITH_SHARED = (
    "qwen2_moe", "qwen3_next", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "nemotron_h", "dots1",
    "hunyuan_v1_moe",
)  # fmt: skip
BESIDE_EXPERTS = {"granitemoehybrid"}
"""Their layers, not their blocks of experts, add the shared expert, after the routed ones."""


def test_every_tiny_family_with_shared_experts_is_here() -> None:
    with torch.device("meta"):
        models = {family: AutoModelForCausalLM.from_config(tiny_config(family)) for family in TINY_FAMILIES}
    names = {family: [name for name, _ in model.named_modules()] for family, model in models.items()}
    shared = {family for family, found in names.items() if any(".shared_" in name for name in found)}
    assert shared == {*WITH_SHARED, *BESIDE_EXPERTS}


@pytest.mark.parametrize("family", WITH_SHARED)
def test_the_host_computes_shared_experts_while_servers_compute(
    three_servers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    write_tiny(family, tmp_path)
    local = local_model(tmp_path, dtype=torch.float32)
    tokens = torch.randint(3, 300, (1, 9), generator=torch.manual_seed(5))
    log: list[str] = []

    def logging(cls: type, name: str, word: str) -> None:
        original = getattr(cls, name)

        def logged(*args: Any, **kwargs: Any) -> Any:
            log.append(word)
            return original(*args, **kwargs)

        monkeypatch.setattr(cls, name, logged)

    shared = next(module for name, module in local.named_modules() if name.rpartition(".")[2].startswith("shared"))
    logging(ExpertLink, "send", "send")
    logging(ExpertLink, "receive", "receive")
    logging(type(shared), "forward", "dense")  # also of layers without experts, if it has any
    with open_model(tmp_path, experts=three_servers[:1], model_dtype="f32", device="cpu") as offloaded:
        assert None not in offloaded.dispatcher.meanwhile
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
            log.clear()
            with mode():
                got, expected = offloaded.model(tokens).logits, local(tokens).logits
            assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
            if mode is torch.inference_mode:
                assert " ".join(log).count("send dense receive") == len(offloaded.dispatcher.meanwhile)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.up(rows).relu()


class Routed(nn.Module):
    moeoffload_call: Any

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.moeoffload_call(rows, rows, rows)
        return result


class Block(nn.Module):
    """Stands for a block of transformers; ``how`` is what it does with its shared experts."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.experts, self.shared_mlp, self.shared_gate = how, Routed(), Mlp(), nn.Linear(8, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.how == "after":
            return self.experts(rows.view(-1, 8)).view(rows.shape) + self.shared_mlp(rows)
        if self.how == "after, of other rows":
            return self.experts(rows) + self.shared_mlp(rows * 2)
        if self.how == "twice":
            return self.experts(rows) + self.shared_mlp(rows) * self.shared_mlp(rows)
        shared = self.shared_mlp(rows)
        if self.how == "read early":
            shared = shared * 2
        sums: torch.Tensor = self.experts(rows) + shared
        return sums


class Model(nn.Module):
    hidden_size, dtype = 8, torch.float32

    def __init__(self, *how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(type(f"Block{i}", (Block,), {})(each) for i, each in enumerate(how))
        self.layers = [type("Layer", (), {"module_name": f"blocks.{i}.experts"}) for i in range(len(how))]


@torch.no_grad()
def test_only_blocks_that_use_the_result_afterwards_are_changed() -> None:
    ways = ("before", "after", "after, of other rows", "twice", "read early")
    model: Any = Model(*ways)
    rows = torch.randn(2, 3, 8)
    for block in model.blocks:
        block.experts.moeoffload_call = lambda hidden, ids, weights: hidden * 3
    expected = [block(rows) for block in model.blocks]
    meanwhile = overlap_shared_experts(model, model)
    assert [each is not None for each in meanwhile[:2]] == [True, True]
    assert meanwhile[3:] == [None, None]
    for block, each, right in zip(model.blocks, meanwhile, expected, strict=True):

        def call(hidden: torch.Tensor, ids: Any, weights: Any, each: Any = each) -> torch.Tensor:
            if each is not None:
                each(hidden)
            return hidden * 3

        block.experts.moeoffload_call = call
        for _ in range(2):
            assert torch.equal(block(rows), right)


@torch.no_grad()
def test_a_call_that_failed_leaves_nothing_to_the_next_one() -> None:
    model: Any = Model("before", "after")
    rows = torch.randn(2, 3, 8)
    for block in model.blocks:
        block.experts.moeoffload_call = None
    meanwhile = overlap_shared_experts(model, model)
    for block, each in zip(model.blocks, meanwhile, strict=True):
        assert each is not None

        def fail(hidden: torch.Tensor, ids: Any, weights: Any, each: Any = each) -> torch.Tensor:
            if hidden is not rows:
                each(hidden)
            raise ConnectionError

        def work(hidden: torch.Tensor, ids: Any, weights: Any, each: Any = each) -> torch.Tensor:
            each(hidden)
            return hidden

        for given in (rows, rows.clone()):
            block.experts.moeoffload_call = fail
            with pytest.raises(ConnectionError):
                block(given)
        block.experts.moeoffload_call = work
        fresh = torch.randn(2, 3, 8)
        assert torch.equal(block(fresh), fresh + Mlp.forward(block.shared_mlp, fresh))


@torch.no_grad()
def test_a_model_that_nobody_has_any_more_goes_at_once() -> None:
    with no_collection():
        model: Any = Model("before", "after")
        for block in model.blocks:
            block.experts.moeoffload_call = None
        meanwhile = overlap_shared_experts(model, model)
        assert None not in meanwhile
        left = [weakref.ref(block.shared_mlp) for block in model.blocks]
        del model, block, meanwhile
        assert [each() for each in left] == [None, None]


def test_what_is_promised_would_be_seen_if_it_were_read() -> None:
    with torch.no_grad():
        shared = Mlp()
        given = shared_experts._Overlapped(shared, comes_first=True)
        assert given._promise(torch.zeros(2, 8)).isnan().all()
