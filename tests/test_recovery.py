"""A lost, slow or wrong expert server: who computes instead, with which bits; all kinds of faults: tests/faults."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from command_lines import wait_until
from conftest import DEMO, StartServer
from fault_kit.generation import LayerClock
from models import edit_config, n_tokens, random_call

from moeoffload import OffloadedModel, open_model
from moeoffload.checkpoint import Checkpoint
from moeoffload.errors import DisagreementError, PlacementError, ServerError
from moeoffload.host.fallback import ExpertCache, _Pool
from moeoffload.kernels import KernelInput, LayerKernels
from moeoffload.placement import ExpertTable, MemoryOffer, place_replicas

N_TOKENS = 16
BACK_S = 60
SPOILT = """
from moeoffload import payload
from moeoffload.kernels.layer import LayerKernels
right = LayerKernels.__call__
def wrong(self, call, workspace=None):
    right(self, call, workspace)
    {}
LayerKernels.__call__ = wrong
"""
WRONG = SPOILT.format("call.out.mul_(1.5)")
NOT_A_NUMBER = SPOILT.format('call.out[-1, -1] = float("nan")')
UNSEEN = f"{NOT_A_NUMBER}payload.first_bad_row = lambda rows: None"
"""A server that does not look at what it computes."""


def tokens_of(offloaded: OffloadedModel) -> list[int]:
    prompt = torch.randint(5, 30, (1, 24), generator=torch.Generator().manual_seed(7))
    return n_tokens(offloaded.model, prompt, N_TOKENS)


def strike(offloaded: OffloadedModel, at: int, do: Callable[[], None]) -> None:
    """Calls ``do`` once, when the experts of a layer are asked for the ``at``-th time from now on."""
    LayerClock(offloaded.dispatcher).start(at - 1, do)


def recovery(offloaded: OffloadedModel) -> dict[str, int]:
    figures: dict[str, int] = offloaded.report().to_json()["recovery"]
    return figures


def is_back(offloaded: OffloadedModel, address: str) -> bool:
    """Whether every part that a server is to hold is there again, and its event is told, too: under the same lock."""
    back = []
    for shard in offloaded.shards:
        with shard._lock:
            back += [each.link is not None for each in shard.holders if each.address == address]
    return all(back)


def test_a_kill_in_the_middle_of_a_pipelined_prompt_changes_no_logit(start_server: StartServer) -> None:
    servers = [start_server(), start_server()]
    prompt = torch.randint(5, 30, (1, 600), generator=torch.Generator().manual_seed(3))
    with open_model(DEMO, experts=[server.address for server in servers], threads=1) as offloaded, torch.no_grad():
        undisturbed = offloaded.model(prompt, logits_to_keep=1).logits
        strike(offloaded, 5, servers[0].process.kill)
        assert torch.equal(offloaded.model(prompt, logits_to_keep=1).logits, undisturbed)
        assert recovery(offloaded)["lost"] == 1


def test_of_two_servers_that_hold_the_same_each_returns_as_often_as_it_was_lost(start_server: StartServer) -> None:
    servers = [start_server(), start_server()]
    addresses = [server.address for server in servers]
    with open_model(DEMO, experts=addresses, replicas=2, threads=1) as offloaded:
        for number, n_lost in ((1, 1), (0, 3)):  # of both parts, as far as it computed them
            servers[number].kill()
            wait_until(lambda n_lost=n_lost: recovery(offloaded)["lost"] == n_lost, "the loss", BACK_S)  # type: ignore[misc]
        for address in reversed(addresses):
            start_server("--listen", address)
            wait_until(lambda address=address: is_back(offloaded, address), "the return", BACK_S)  # type: ignore[misc]
        events: Any = recovery(offloaded)["events"]
    for address in addresses:
        told = [event["what"] for event in events if event["server"] == address]
        assert told.count("lost") == told.count("returned"), events


def test_rows_that_could_not_be_sent_are_computed_elsewhere(three_servers: list[str]) -> None:
    prompt = torch.randint(5, 30, (1, 24), generator=torch.Generator().manual_seed(3))
    with open_model(DEMO, experts=three_servers[:2], replicas=2, threads=1) as offloaded, torch.no_grad():
        expected = offloaded.model(prompt).logits
        with patch.object(offloaded.links[0].channel, "send", side_effect=ServerError("it takes nothing")):
            assert torch.equal(offloaded.model(prompt).logits, expected)
        assert recovery(offloaded)["lost"] == 1


def test_what_a_second_ctrl_c_leaves_in_flight_is_not_added_to_the_next_call(three_servers: list[str]) -> None:
    prompts = torch.randint(5, 30, (2, 1, 24), generator=torch.Generator().manual_seed(3))
    with open_model(DEMO, experts=three_servers[:2], threads=1) as offloaded, torch.no_grad():
        expected = offloaded.model(prompts[1]).logits
        waiting, leaving = (
            patch.object(offloaded.links[0], name, side_effect=KeyboardInterrupt) for name in ("receive", "release")
        )
        with waiting, leaving, pytest.raises(KeyboardInterrupt):
            offloaded.model(prompts[0])
        assert torch.equal(offloaded.model(prompts[1]).logits, expected)


def test_verification_accepts_right_servers_and_names_a_wrong_one(
    three_servers: list[str], start_server: StartServer
) -> None:
    wrong_ones = [start_server(patch=patch) for patch in (WRONG, NOT_A_NUMBER, UNSEEN)]
    for replicas in (1, 2):
        options: dict[str, Any] = {"replicas": replicas, "verify_percent": 100, "threads": 1}
        with open_model(DEMO, experts=three_servers[:2], **options) as offloaded:
            assert len(tokens_of(offloaded)) == N_TOKENS
            assert recovery(offloaded)["verified"] > N_TOKENS
        for wrong in wrong_ones:
            disagree = pytest.raises(DisagreementError, match=f"{wrong.address}.*disagree: layer")
            with open_model(DEMO, experts=[three_servers[0], wrong.address], **options) as offloaded, disagree:
                tokens_of(offloaded)


def test_the_cache_computes_any_experts_in_little_memory_with_the_bits_of_all_at_once() -> None:
    checkpoint = Checkpoint.open(DEMO)
    layer, device = checkpoint.layers[0], torch.device("cpu")
    rows, ids, weights = random_call(checkpoint, 64)
    together = torch.empty(rows.shape)
    LayerKernels(checkpoint.build_experts(0, range(layer.n_experts), device))(KernelInput(rows, ids, weights, together))
    room = checkpoint.top_k + 1
    cache = ExpertCache(checkpoint, room * layer.expert_bytes, device)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            out = torch.empty(rows.shape)
            cache.compute(0, rows, ids, weights, out)
            assert torch.equal(out, together)
    assert [pool.n_slots for pool in cache._pools.values()] == [room]
    with patch.object(checkpoint, "build_experts", wraps=checkpoint.build_experts) as build:

        def n_read(cache: ExpertCache) -> int:
            build.reset_mock()
            for _ in range(3):
                cache.compute(0, rows, ids, weights, torch.empty(rows.shape))
            return sum(len(call.args[1]) for call in build.call_args_list)

        assert n_read(cache) > layer.n_experts, "a cache this small reads some experts again"
        assert n_read(ExpertCache(checkpoint, 1 << 30, device)) == len(ids.unique())


def test_a_read_that_was_interrupted_leaves_no_expert_in_the_place_of_another() -> None:
    checkpoint = Checkpoint.open(DEMO)
    layer = checkpoint.layers[0]
    rows, ids, weights = random_call(checkpoint, 64)
    cache = ExpertCache(checkpoint, (checkpoint.top_k + 1) * layer.expert_bytes, torch.device("cpu"))
    expected, out = torch.empty(rows.shape), torch.empty(rows.shape)
    cache.compute(0, rows, ids, weights, expected)
    choose = _Pool._free_slot

    def interrupted(*args: Any) -> int:
        choose(*args)
        raise KeyboardInterrupt

    for _ in range(3):
        with patch.object(_Pool, "_free_slot", interrupted), pytest.raises(KeyboardInterrupt):
            cache.compute(0, rows, ids, weights, out)
        cache.compute(0, rows, ids, weights, out)
        assert torch.equal(out, expected)


def test_replicas_lie_on_other_servers_with_room() -> None:
    tables = [ExpertTable(((0, 1),)), ExpertTable(((2,),)), ExpertTable(((3,),))]
    offers = [MemoryOffer("a", 20), MemoryOffer("b", 40), MemoryOffer("c", 10)]
    assert place_replicas(tables, [10], offers, 1) == [[0], [1], [2]]
    roomy = [MemoryOffer(name, 40) for name in "abc"]
    assert place_replicas(tables, [10], roomy, 2) == [[0, 1], [1, 2], [2, 0]]
    with pytest.raises(PlacementError, match="replicas is 4, but there are 3 expert servers"):
        place_replicas(tables, [10], roomy, 4)
    with pytest.raises(PlacementError, match="3 copies of the routed experts do not fit"):
        place_replicas(tables, [10], offers, 3)


def test_a_server_that_comes_back_with_another_kernel_or_model_is_refused_by_name(
    start_server: StartServer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO", "moeoffload.host")
    server = start_server()
    with open_model(DEMO, experts=[server.address], threads=1) as offloaded:
        expected = tokens_of(offloaded)
        server.kill()
        changed = start_server("--listen", server.address, "--kernel", "grouped")
        wait_until(lambda: "kernel is tiled (host), grouped here" in caplog.text, "the refusal", BACK_S)
        changed.kill()
        other = shutil.copytree(DEMO, tmp_path / "other")
        edit_config(other, rms_norm_eps=0.5)
        start_server("--listen", server.address, "--model", str(other))
        wait_until(lambda: "model digest is" in caplog.text, "the refusal", BACK_S)
        assert tokens_of(offloaded) == expected
        assert recovery(offloaded)["returned"] == 0


def test_a_replica_must_compute_with_the_same_kernel(three_servers: list[str], grouped_server: str) -> None:
    addresses = [three_servers[0], grouped_server]
    with pytest.raises(ServerError, match=r"kernel is .* here"):
        open_model(DEMO, experts=addresses, replicas=2, threads=1)
