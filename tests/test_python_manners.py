"""What a Python developer may do with an open model, in any mode of torch, and what is refused."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import wait_until
from conftest import DEMO, RunningServer, demo_prompt, no_collection, stats, wait_until_left

from moeoffload import open_model
from moeoffload.errors import ModelError


def test_a_backward_pass_is_refused_and_a_forward_one_is_not_and_so_is_saving_without_experts(
    three_servers: list[str], tmp_path: Path
) -> None:
    with open_model(DEMO, experts=three_servers[:1], device="cpu") as offloaded:
        logits = offloaded.model(torch.tensor([[5, 6, 7]])).logits
        with torch.no_grad():
            without = offloaded.model(torch.tensor([[5, 6, 7]])).logits
        assert torch.equal(without.argmax(-1), logits.argmax(-1))
        with pytest.raises(ModelError, match="no gradient passes through routed experts"):
            logits.float().sum().backward()
        with pytest.raises(ModelError, match="cannot be saved; copy"):
            offloaded.model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": contextlib.nullcontext,
}


@pytest.mark.parametrize(("opened_in", "local_gib"), [("inference", 0), ("no_grad", 0.001), ("grad", 0)])
def test_calls_of_any_size_work_after_a_call_in_another_mode(
    three_servers: list[str], opened_in: str, local_gib: float
) -> None:
    prompt = demo_prompt(200, seed=3)
    with MODES[opened_in]():
        offloaded = open_model(DEMO, experts=three_servers[:2], local_experts_gib=local_gib, device="cpu")
    expected: dict[tuple[int, bool], torch.Tensor] = {}
    with offloaded:
        for order in permutations(MODES):
            # One size for each number of rows that takes another way: a decode step, a few rows, a batch, a prompt.
            for n_rows in (1, 4, 40, 200):
                for mode in order:
                    with MODES[mode]():
                        logits = offloaded.model(prompt[:, :n_rows], logits_to_keep=1).logits.detach()
                    # With gradients the dense layers run transformers' own operations, which round otherwise.
                    known = expected.setdefault((n_rows, mode == "grad"), logits)
                    assert torch.equal(known, logits), (order, mode, n_rows)
        offloaded.model.generate(prompt, max_new_tokens=4, do_sample=False)


def test_a_model_that_is_not_closed_leaves_its_server_when_nobody_has_it_any_more(server: RunningServer) -> None:
    prompt = demo_prompt(8, seed=1)
    with no_collection():  # what goes has to go at once
        for _ in range(2):  # as a cell of a notebook that is run again
            offloaded = open_model(DEMO, experts=[server.address], threads=1, device="cpu")
        wait_until(lambda: stats(server.address).leases == 1, "the end of the first one's lease")
        model = offloaded.model
        expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
        del offloaded
        assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), expected)
        assert stats(server.address).leases == 1
        del model
        wait_until_left(server.address)


@pytest.mark.parametrize("is_closed", [True, False])
def test_weights_of_a_model_that_nobody_has_any_more_go_at_once(is_closed: bool) -> None:
    with no_collection():  # a notebook that opens the next model does not wait for one
        offloaded = open_model(DEMO, local_experts_gib=1.0, device="cpu")
        offloaded.model(torch.tensor([[5, 6, 7]]))
        held = [weakref.ref(module) for module in offloaded.model.modules()]
        held += [weakref.ref(parameter) for parameter in offloaded.model.parameters()]
        local = weakref.ref(offloaded.dispatcher)
        if is_closed:
            offloaded.close()
        del offloaded
        assert [each() for each in held if each() is not None] == []
        assert local() is None


def test_a_closed_model_can_be_closed_again_and_shown(server: RunningServer) -> None:
    offloaded = open_model(DEMO, experts=[server.address], threads=1, device=torch.device("cpu"), dtype=torch.bfloat16)
    offloaded.model.generate(demo_prompt(8, seed=1), max_new_tokens=4, do_sample=False)
    assert "closed" not in repr(offloaded)
    offloaded.close()
    offloaded.close()
    assert "payload bf16, closed" in " ".join(repr(offloaded).split())
    assert server.address in str(offloaded)
    report = offloaded.report()
    assert re.search(r"tokens per s +│ +[0-9]", repr(report))
    for html in (offloaded._repr_html_(), report._repr_html_()):
        assert html.startswith("<pre>")
        assert server.address in html


def test_threads_that_share_a_model_are_counted_each_by_itself(server: RunningServer) -> None:
    prompts = [demo_prompt(n, seed=n) for n in (900, 8, 40)]
    with open_model(DEMO, experts=[server.address], threads=1, device="cpu", model_dtype="f32") as offloaded:

        def answer(prompt: torch.Tensor) -> torch.Tensor:
            return offloaded.model.generate(prompt, max_new_tokens=20, min_new_tokens=20, do_sample=False)

        alone = [answer(prompt) for prompt in prompts]
        before = offloaded.report()
        offloaded.recorder.reset()
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(answer, prompts))
        report = offloaded.report()
    assert all(map(torch.equal, alone, together))
    assert report.prompt_tokens == before.prompt_tokens == 948
    assert report.completion_tokens == before.completion_tokens
    for name, phase in report.phases.items():
        assert phase["tokens"] == before.phases[name]["tokens"]
        assert phase["complete"], name
        assert phase["accounted"] < 1.05, name
