"""The whole path with a GPU on one side or on both: answers, bits, memory, faults. ``make gpu`` runs this.

``TESTS_ON_GPU=rehearsal`` has the CPU stand in for the GPU, so that the tests themselves can be tried anywhere.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tasks
import torch
from conftest import DEMO, StartServer, connected, local_model
from fault_kit.generation import LayerClock, generate
from many_requests.client import ask, limits
from models import demo_tokenizer
from synthetic import write_tiny
from transformers import AttentionInterface

from moeoffload import open_model
from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.copy_buffers import CopyBuffers
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.paged_attention import IMPLEMENTATION, SingleRows, paged_attention

GPU = {"1": "cuda", "rehearsal": "cpu"}.get(os.environ.get("TESTS_ON_GPU", ""), "")
IS_REAL = GPU == "cuda"
pytestmark = pytest.mark.skipif(
    not GPU or (IS_REAL and not torch.cuda.is_available()), reason="no GPU: `make gpu` runs this on a machine with one"
)
PLACES = [("cpu", GPU), (GPU, "cpu"), (GPU, GPU)]
FILLED = 0.8
"""Of the free memory, taken by others."""


def answers(offloaded: Any, prompts: list[str]) -> list[list[int]]:
    return [generate(offloaded, prompt, max_new_tokens=12) for prompt in prompts]


@pytest.fixture(scope="module")
def expected() -> tuple[list[str], list[list[int]]]:
    """Prompts, and the tokens of a local run in float32 on the CPU."""
    prompts = tasks.prompts(8, seed=21)
    local = SimpleNamespace(model=local_model(DEMO, dtype=torch.float32), tokenizer=demo_tokenizer())
    return prompts, answers(local, prompts)


@pytest.mark.parametrize("transport", ["shared", "stream"])
@pytest.mark.parametrize(("host", "server"), PLACES, ids=["cpu-gpu", "gpu-cpu", "gpu-gpu"])
def test_answers_are_those_of_a_local_run(
    host: str, server: str, transport: str, expected: Any, start_server: StartServer
) -> None:
    prompts, tokens = expected
    running = start_server("--device", server, warm=False)
    where: dict[str, Any] = {"experts": [running.address], "device": host, "transport": transport}
    with open_model(DEMO, model_dtype="f32", dtype="f32", **where) as offloaded:
        (link,) = offloaded.links
        assert link.info.transport == transport
        assert answers(offloaded, prompts) == tokens
        if IS_REAL and server == GPU:
            assert "triton" in link.info.kernel
    assert "page-locked" not in running.log_text


def test_grouped_products_give_the_bits_of_a_local_run(start_server: StartServer) -> None:
    server = start_server("--device", GPU, "--kernel", "grouped", warm=False)
    prompt = torch.randint(5, 250, (1, 40), generator=torch.manual_seed(3)).to(GPU)
    local = local_model(DEMO).to(GPU)
    with (
        open_model(DEMO, experts=[server.address], device=GPU, dtype="f32", fast_dense=False) as offloaded,
        torch.inference_mode(),
    ):
        assert torch.equal(offloaded.model(prompt).logits, local(prompt).logits)


def test_a_second_host_finds_the_memory_that_the_first_gave_back(start_server: StartServer, tmp_path: Path) -> None:
    model = write_tiny("qwen3_moe", tmp_path / "m", experts=64, moe_intermediate_size=512, hidden_size=256)
    server = start_server("--device", GPU, "--keep-warm", "off", warm=False)
    offered = []
    with filled() if IS_REAL else contextlib.nullcontext(), connected(server.address) as client:
        for _ in range(3):
            offered.append(client.describe(10).offered_bytes)
            with open_model(model, experts=[server.address], device=GPU) as offloaded, torch.inference_mode():
                offloaded.model(torch.ones(1, 32, dtype=torch.long, device=GPU))
            gc.collect()
    assert min(offered) >= 0.95 * max(offered)


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_several_devices_give_the_answers_of_a_local_run(
    transport: str, expected: Any, start_server: StartServer
) -> None:
    prompts, tokens = expected
    others = [f"cuda:{n}" for n in range(torch.cuda.device_count())] if IS_REAL else []
    first, second = (*others[:2], *others[:1], GPU, GPU)[:2]  # one GPU, or the CPU, stands in for two
    patch = "import torch\nfrom moeoffload.expert_server import server\n"
    patch += f"server.resolve_devices = lambda *_, **how: (torch.device({first!r}), torch.device({second!r}))"
    server = start_server("--memory-gib", "1", patch=patch, warm=False)
    where: dict[str, Any] = {"experts": [server.address], "device": GPU, "transport": transport}
    with open_model(DEMO, model_dtype="f32", dtype="f32", **where) as offloaded:
        assert answers(offloaded, prompts) == tokens
        assert offloaded.links[0].info.kernel.endswith("on 2 devices")
        offloaded.model(torch.ones(1, 600, dtype=torch.long, device=GPU))


def test_experts_read_through_page_locked_buffers_are_those_that_are_stored() -> None:
    checkpoint, layer = Checkpoint.open(DEMO), range(32)
    with CopyBuffers(5 * checkpoint.layers[0].expert_bytes // 2) as buffers:
        for number in range(4):
            through: Any = checkpoint.build_experts(number, layer, torch.device(GPU, 0), buffers=buffers)
            stored: Any = checkpoint.build_experts(number, layer, torch.device("cpu"))
            for name, values in stored.named_parameters():
                assert torch.equal(through.get_parameter(name).cpu(), values), name
        if IS_REAL:
            assert buffers._pages is not None
            assert buffers._pages.is_locked
    assert buffers._pages is None


def test_the_batch_capacity_is_measured(start_server: StartServer) -> None:
    server = start_server("--device", GPU, warm=False)
    with open_model(DEMO, experts=[server.address], device=GPU) as offloaded, torch.inference_mode():
        assert offloaded.links[0].layout.capacity in ((1024, 2048, 4096) if IS_REAL else (1024,))
        offloaded.model(torch.ones(1, 5000, dtype=torch.long, device=GPU), logits_to_keep=1)


@contextlib.contextmanager
def filled() -> Iterator[None]:
    """Takes most of the GPU's free memory."""
    ballast = torch.empty(int(FILLED * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device="cuda")
    yield
    del ballast
    torch.cuda.empty_cache()


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_server_killed_in_mid_decode_changes_no_token(
    transport: str, expected: Any, start_server: StartServer
) -> None:
    prompts, tokens = expected
    server = start_server("--device", GPU, warm=False)
    where: dict[str, Any] = {"experts": [server.address], "device": GPU, "transport": transport}
    with open_model(DEMO, model_dtype="f32", dtype="f32", **where) as offloaded:
        LayerClock(offloaded.dispatcher).start(6, server.kill)
        assert answers(offloaded, prompts) == tokens
        assert offloaded.report().to_json()["recovery"]["lost"] == 1


def test_every_part_is_verified_by_another_device(expected: Any, start_server: StartServer) -> None:
    prompts, tokens = expected
    servers = [start_server("--device", GPU, warm=False).address for _ in range(2)]
    where: dict[str, Any] = {"experts": servers, "device": GPU, "replicas": 1}
    with open_model(DEMO, model_dtype="f32", dtype="f32", verify_percent=100, **where) as offloaded:
        assert answers(offloaded, prompts) == tokens
        assert offloaded.report().to_json()["recovery"]["verified"] > 0


def test_attention_of_requests_together_makes_the_host_wait_for_nothing(
    expected: Any, start_server: StartServer
) -> None:
    prompts, tokens = expected
    server = start_server("--device", GPU, warm=False)
    calls = []

    def watched(*arguments: Any, **keywords: Any) -> Any:
        calls.append(keywords["packed_rows"])
        if not IS_REAL:
            return paged_attention(*arguments, **keywords)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return paged_attention(*arguments, **keywords)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    AttentionInterface.register(IMPLEMENTATION, watched)
    try:
        where: dict[str, Any] = {"experts": [server.address], "device": GPU}
        with (
            open_model(DEMO, model_dtype="f32", dtype="f32", **where) as offloaded,
            ServingEngine(offloaded, limits()) as engine,
        ):
            asked = [ask(engine, offloaded.tokenizer(prompt)["input_ids"], 12) for prompt in prompts]
            assert None not in {answer.finish for answer in asked}
            assert [answer.tokens for answer in asked] == tokens
    finally:
        AttentionInterface.register(IMPLEMENTATION, paged_attention)
    shared = any(isinstance(each, SingleRows) for call in calls for each in call.segments)
    assert shared == IS_REAL


def test_both_modes_of_autograd_follow_each_other(start_server: StartServer) -> None:
    server = start_server("--device", GPU, warm=False)
    prompt = torch.randint(5, 250, (1, 40), generator=torch.manual_seed(3)).to(GPU)
    with open_model(DEMO, experts=[server.address], device=GPU) as offloaded:
        with torch.inference_mode():
            first = offloaded.model(prompt).logits.clone()
        with torch.no_grad():
            assert torch.equal(offloaded.model(prompt).logits, first)


def test_the_report_tells_dense_work_from_what_waits_for_it(start_server: StartServer) -> None:
    server = start_server("--device", GPU, warm=False)
    with open_model(DEMO, experts=[server.address], device=GPU, profile=True) as offloaded, torch.inference_mode():
        ids = torch.randint(5, 200, (1, 64), device=GPU)
        if IS_REAL:  # a GPU needs 20 ms for it and is told within microseconds
            large, out = torch.ones(8192, 8192, device=GPU), torch.empty(8192, 8192, device=GPU)

            def more_work(*_: object) -> None:
                torch.mm(large, large, out=out)

            offloaded.dispatcher.on_routes = more_work
        for _ in range(2):
            offloaded.model(ids)
            phase = offloaded.report().phases["prefill"]
        assert phase["complete"]
        assert not IS_REAL or phase["host"]["dense_s"] > 5 * phase["host"]["pack_s"]
