"""Two hosts on one server: experts of the same model are shared, tokens are right, and neither needs the other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from command_lines import CLEAN_TIMEOUT_S, STEP_TIMEOUT_S, wait_until
from conftest import DEMO, RunningServer, StartServer, connected, local_model
from synthetic import write_tiny

from moeoffload.control.client import ControlClient
from moeoffload.host.session import OffloadedModel, open_model

N_TOKENS = 24
WAIT_S = 100


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("mixtral", tmp_path_factory.mktemp("mixtral"), dtype=torch.float32)


@pytest.fixture
def stats(server: RunningServer) -> Iterator[ControlClient]:
    """A client of a server that nobody uses, neither before the test nor after it."""
    with connected(server.address) as client:
        wait_until(lambda: client.stats(STEP_TIMEOUT_S).leases == 0, "no hosts", CLEAN_TIMEOUT_S)
        yield client
        wait_until(lambda: client.stats(STEP_TIMEOUT_S).leases == 0, "the end of all leases", CLEAN_TIMEOUT_S)
        assert client.stats(STEP_TIMEOUT_S).resident_bytes == 0


def prompt(first: int, n: int = 16) -> torch.Tensor:
    """(1, n) token ids that every tiny vocabulary has."""
    return (torch.arange(n) * 7 + first).remainder(200).add(5).unsqueeze(0)


def generate(model: torch.nn.Module, first: int) -> list[int]:
    """Greedy tokens, the same number whatever they are."""
    ids = prompt(first)
    tokens: torch.Tensor = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=N_TOKENS, max_new_tokens=N_TOKENS
    )
    return tokens[0, ids.shape[1] :].tolist()


def open_on(server: RunningServer, model: Path, dtype: str = "f32") -> OffloadedModel:
    """In float32, since the prompts are noise: in a short dtype their tokens hang on the order of additions."""
    return open_model(model, experts=[server.address], threads=1, model_dtype=dtype)


def local_tokens(model: Path) -> list[list[int]]:
    reference = local_model(model, dtype=torch.float32)
    return [generate(reference, first) for first in range(3)]


def expert_bytes(model: OffloadedModel) -> int:
    return sum(layer.n_experts * layer.expert_bytes for layer in model.checkpoint.layers)


def generate_at_once(*models: OffloadedModel) -> list[list[list[int]]]:
    """What each model generates for three prompts while the others do so too."""

    def three(host: OffloadedModel) -> list[list[int]]:
        return [generate(host.model, first) for first in range(3)]

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(three, models, timeout=WAIT_S))


@pytest.mark.parametrize("same", [True, False], ids=["one model", "two models"])
def test_hosts_share_experts_of_one_model_only_and_generate_what_a_local_run_does(
    server: RunningServer, stats: ControlClient, other_model: Path, same: bool
) -> None:
    models = (DEMO, DEMO if same else other_model)
    expected = [local_tokens(model) for model in models]
    assert (expected[0] == expected[1]) == same
    first, second = (open_on(server, model) for model in models)
    with second:
        with first:
            together = stats.stats(STEP_TIMEOUT_S)
            resident = expert_bytes(second) + (0 if same else expert_bytes(first))
            assert (together.leases, together.resident_bytes) == (2, resident)
            assert generate_at_once(first, second) == expected
        wait_until(lambda: stats.stats(STEP_TIMEOUT_S).leases == 1, "the end of one lease", CLEAN_TIMEOUT_S)
        assert stats.stats(STEP_TIMEOUT_S).resident_bytes == expert_bytes(second), "the other host still uses them"
        assert generate(second.model, 0) == expected[1][0]


def test_the_same_model_in_another_dtype_has_experts_of_its_own(server: RunningServer, stats: ControlClient) -> None:
    with open_on(server, DEMO, "bf16") as first, open_on(server, DEMO) as second:
        resident = stats.stats(STEP_TIMEOUT_S).resident_bytes
        assert resident == expert_bytes(first) + expert_bytes(second) == 3 * expert_bytes(first)
        assert generate(second.model, 0) == local_tokens(DEMO)[0]


# Says where the memory grows that all hosts' calls work in.
WATCHED = """
import sys, threading
from moeoffload.kernels.layer import LayerKernels
reserve = LayerKernels.reserve
def watched(self, *arguments):
    print("reserved in thread", threading.current_thread().name, file=sys.stderr, flush=True)
    reserve(self, *arguments)
LayerKernels.reserve = watched
"""


def test_a_host_that_attaches_moves_no_memory_under_the_calls_of_another(start_server: StartServer) -> None:
    server = start_server(patch=WATCHED)
    with open_on(server, DEMO) as first, open_on(server, DEMO, "bf16"):
        generate(first.model, 0)
    lines = [line for line in server.log_text.splitlines() if line.startswith("reserved in thread")]
    assert set(lines) == {"reserved in thread engine"}
