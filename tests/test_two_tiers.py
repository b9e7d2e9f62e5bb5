"""``--ram-gib``: experts in two memories, hot ones on the device. On a CPU both are RAM, with limits of their own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.test_build_experts import UNUSUAL
from command_lines import Commands
from conftest import DEMO, StartServer, stats
from hypothesis import given, settings
from hypothesis import strategies as st
from models import answers, demo_inputs, expert_bytes, local_answers
from synthetic import write_checkpoint, write_tiny
from transformers import CONFIG_MAPPING

from moeoffload import open_model
from moeoffload.checkpoint import Checkpoint
from moeoffload.errors import PlacementError
from moeoffload.expert_server import two_tiers
from moeoffload.expert_server.several_devices import LayerSource
from moeoffload.expert_server.two_tiers import LEAST_SETS, MOST_MOVES, HotExperts, Tiers, TwoTierLayer
from moeoffload.kernels import KernelInput, KernelWorkspace, LayerKernels

CPU = torch.device("cpu")
TOP_K = 4
FAST_GIB, RAM_GIB = 0.003, 0.25
"""Room for 14 of the 32 experts of each of the demo's layers, and for all of them."""


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 40), st.integers(1, 8))
def test_moves_are_few_and_keep_the_tier_full(seed: int, n_fast: int, top_k: int) -> None:
    rng, hot = np.random.default_rng(seed), HotExperts(40, n_fast, top_k)
    for _ in range(150):
        used = rng.choice(40, top_k, replace=False, p=rng.dirichlet(np.full(40, 0.2)) * 0.9 + 0.0025)
        moves = hot.step(used)
        assert len(moves) <= MOST_MOVES
        assert not moves or n_fast >= LEAST_SETS * top_k
        assert len({expert for move in moves for expert in move}) == 2 * len(moves)
        for come, go in moves:
            assert come in used
            assert not hot.is_fast[come]
            assert hot.is_fast[go]
            hot.move(come, go)
        assert hot.is_fast.sum() == n_fast


def hits(hot: HotExperts, steps: Iterator[Any]) -> list[int]:
    """Of each step, how many of its experts were in the fast tier; moves are made as asked."""
    counts = []
    for used in steps:
        counts.append(int(hot.is_fast[used].sum()))
        for move in hot.step(used):
            hot.move(*move)
    return counts


def test_hits_follow_use_and_experts_in_turn_drive_out_nobody() -> None:
    rng, hot = np.random.default_rng(1), HotExperts(64, 16, 4)
    favourites = np.arange(40, 52)
    counts = hits(hot, (rng.choice(favourites, 4, replace=False) for _ in range(300)))
    assert sum(counts[:4]) <= 2
    assert min(counts[-100:]) == 4
    counts = hits(hot, (rng.choice(favourites - 30, 4, replace=False) for _ in range(600)))
    assert min(counts[-100:]) == 4, "other favourites come in their place"
    in_turn = HotExperts(64, 16, 4)
    counts = hits(in_turn, ((np.arange(4) + 4 * step) % 20 for step in range(500)))
    assert sum(counts) == 500 * 4 * 16 // 20, "plain LRU has no hit here"


def routes(n_rows: int, experts: Any, n_experts: int, generator: torch.Generator) -> torch.Tensor:
    """(n_rows, TOP_K) slots, favourites more often; some are not held here."""
    likely = torch.full((n_experts,), 0.02)
    likely[list(experts)] = 1.0
    slots = torch.multinomial(likely.expand(n_rows, -1), TOP_K, generator=generator)
    slots[torch.rand(n_rows, TOP_K, generator=generator) < 0.1] = -1
    return slots


def layers_of(checkpoint: Checkpoint, n_fast: int, tiers: Tiers) -> tuple[TwoTierLayer, LayerKernels]:
    """Layer 0 in two tiers, and whole."""
    experts = range(checkpoint.layers[0].n_experts)
    tiered = TwoTierLayer(LayerSource(checkpoint, 0, experts, KernelWorkspace(), "auto"), n_fast, tiers)
    return tiered, LayerKernels(checkpoint.build_experts(0, experts, CPU), KernelWorkspace(), "auto")


@pytest.fixture(params=["bf16", "int4", "fp8", "mxfp4", "gpt_oss", "muse_spark"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    if request.param == "gpt_oss":  # biases, and weights stored (in, out)
        return Checkpoint.open(write_tiny("gpt_oss", tmp_path), dtype=torch.bfloat16)
    if request.param == "muse_spark":  # the norm after its experts, which they share
        write_checkpoint(CONFIG_MAPPING["muse_spark"](**UNUSUAL["muse_spark"][0]), tmp_path)
        return Checkpoint.open(tmp_path, dtype=torch.bfloat16)
    return Checkpoint.open(DEMO, expert_format=None if request.param == "bf16" else request.param)


@torch.inference_mode()
def test_sums_are_the_same_while_experts_move(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_tiers, "MOVING_PART", float("inf"))
    tiers = Tiers(CPU, 1 << 30, 1 << 30)
    n_experts, generator = checkpoint.layers[0].n_experts, torch.Generator().manual_seed(2)
    tiered, whole = layers_of(checkpoint, n_experts // 2, tiers)
    tiered._hot._moves = True  # the tiny one has few experts

    def check(n_rows: int, experts: Any) -> None:
        rows = torch.randn(n_rows, whole.hidden, generator=generator).to(whole.dtype)
        slots, weights = routes(n_rows, experts, n_experts, generator), torch.rand(n_rows, TOP_K, generator=generator)
        out, expected = torch.empty(2, n_rows, whole.hidden)
        given = KernelInput(rows, slots, weights, out)
        whole(given._replace(out=expected))
        tiered(given)
        assert (out - expected).norm() <= 2**-16 * expected.norm()
        for _ in tiered.in_slices(given._replace(out=out.zero_())):
            before = tiers.moves
            tiered(KernelInput(rows[:1], slots[:1], weights[:1], torch.empty(1, whole.hidden)), KernelWorkspace())
            assert tiers.moves == before, "a long call knows where its experts were"
        assert (out - expected).norm() <= 2**-16 * expected.norm()

    last = range(n_experts - n_experts // 4, n_experts)
    for n_rows in (1, 1, 3, 40) * 15:
        tiered._slow_s = float("inf") if n_rows == 40 and tiers.moves % 2 else 0.0  # computed on the device, or in RAM
        check(n_rows, last)
    assert tiers.moves > 0
    assert tiers.fast_routes + tiers.slow_routes > 0
    assert tiered._hot.is_fast[list(last)].mean() > 0.5, "hot ones have come"
    row, wrong = torch.zeros(1, whole.hidden, dtype=whole.dtype), torch.full((1, TOP_K), n_experts)
    with pytest.raises(IndexError, match="slots must be -1 to"):
        tiered(KernelInput(row, wrong, *torch.ones(2, 1, TOP_K)))


def test_each_memory_keeps_to_its_budget_also_if_two_hosts_load_at_the_same_time() -> None:
    checkpoint = Checkpoint.open(DEMO)
    size, n_layers = checkpoint.layers[0].expert_bytes, len(checkpoint.layers)
    for ram in (13 * n_layers, 62 * n_layers):  # in experts; the first is all that must be there
        tiers, layers = Tiers(CPU, 20 * n_layers * size, ram * size), list[LayerKernels]()
        n_experts, n_hosts = 32, 1 if ram < 32 * n_layers else 2
        shares = [tiers.share(n_layers * n_experts * size)] * n_hosts

        def build(layer: int, fast_part: float, tiers: Tiers = tiers) -> LayerKernels:
            source = LayerSource(checkpoint, layer, range(32), KernelWorkspace(), "auto")
            return tiers.build(source, lambda: None, fast_part)

        for layer in range(n_layers):
            layers += [build(layer, share) for share in shares]
        n_ram = (tiers.budgets[1] - tiers.free[1]) // size
        assert 0 < n_ram <= ram
        assert (
            tiers._used[0] == (n_hosts * n_layers * 32 - n_ram + tiers._stage_bytes // size) * size <= tiers.budgets[0]
        )
        assert n_hosts == 1 or tiers.batch_room > 0
        del layers
        gc.collect()
        assert tiers._used == [0, 0]


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_server_with_two_tiers_gives_the_tokens_of_a_local_run(start_server: StartServer, transport: str) -> None:
    server = start_server("--memory-gib", str(FAST_GIB), "--ram-gib", str(RAM_GIB))
    for attempt in range(2):
        with open_model(DEMO, experts=[server.address], transport=transport, device="cpu") as offloaded:
            for at in (0, 16, 32, 48):
                some = {name: values[at : at + 16] for name, values in demo_inputs().items()}
                assert answers(offloaded.model, some) == local_answers()[at : at + 16], f"attempt {attempt}"
            (about,) = offloaded.report().to_json()["servers"]
            assert "two tiers of" in about["kernel"]
            told = stats(server.address)
            assert told.resident_bytes == expert_bytes(Checkpoint.open(DEMO))
            assert 0 < told.tiers.fast_bytes <= FAST_GIB * 2**30 < told.resident_bytes
            assert told.tiers.fast_routes > 0
            assert told.tiers.slow_routes > 0
    assert stats(server.address).read_bytes == told.resident_bytes, "the second host found them warm"


def test_another_model_takes_the_place_of_what_is_warm(start_server: StartServer, tmp_path: Path) -> None:
    other = write_tiny("qwen3_moe", tmp_path)
    server = start_server("--memory-gib", str(FAST_GIB), "--ram-gib", str(RAM_GIB))
    fast = []
    for model in (DEMO, other, DEMO):
        with open_model(model, experts=[server.address], device="cpu") as offloaded, torch.inference_mode():
            offloaded.model(torch.arange(5, 25)[None])
            fast.append(stats(server.address).tiers.fast_bytes)
    assert fast[0] == fast[2] > 0
    assert 0 < fast[1] <= FAST_GIB * 2**30


def test_experts_that_neither_memory_holds_are_refused(start_server: StartServer) -> None:
    server = start_server("--memory-gib", "0.001", "--ram-gib", "0.003")
    with pytest.raises(PlacementError, match=r"offered +0.003686 GiB"):
        open_model(DEMO, experts=[server.address], device="cpu")


def test_without_a_device_ram_gib_needs_memory_gib(commands: Commands) -> None:
    result = commands.run("moeoffload-expert", "--memory-gib", "none", "--ram-gib", "1", "--listen", "127.0.0.1:0")
    assert result.code == 2
    assert "ram-gib: on a CPU it needs memory-gib" in result.err
    assert "Traceback" not in result.err
