"""What tests share: real expert server processes, the demo checkpoint, local reference models."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from command_lines import CLEAN_TIMEOUT_S, STEP_TIMEOUT_S, Commands, wait_until
from server_processes import DEMO, READY_TIMEOUT_S, ROOT, ServerProcess

if TYPE_CHECKING:
    from moeoffload.control.client import ControlClient
    from moeoffload.control.v1 import expert_service_pb2 as pb

__all__ = ["DEMO", "READY_TIMEOUT_S", "ROOT"]

# Tests run several processes on few cores; one thread each is what a shared machine can bear.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same tests everywhere: a GPU is seen by those alone that `make gpu` runs.
if os.environ.get("TESTS_ON_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton at its first import
for name in [name for name in os.environ if name.startswith(("MOEOFFLOAD_", "DFLASH_"))]:
    del os.environ[name]

# A shell starts background jobs with SIGINT ignored, which processes hand on; tests of Ctrl-C need it as in a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path[:0] = [str(ROOT / "examples" / "demo"), str(ROOT / "tests" / "faults")]

RunningServer = ServerProcess
StartServer = Callable[..., RunningServer]


@pytest.fixture(autouse=True, scope="session")
def _place_for_models(tmp_path_factory: pytest.TempPathFactory) -> None:
    import models

    models.place_for_written = tmp_path_factory.mktemp("written")


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers that live as long as the test: ``start_server("--batch-capacity", "64")``."""
    with contextlib.ExitStack() as stack:
        yield lambda *options, **how: stack.enter_context(ServerProcess(tmp_path, *options, **how))


@pytest.fixture(scope="session")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def server(one_server: RunningServer) -> RunningServer:
    """A server that all tests share; nobody uses it when those of a module begin."""
    wait_until_left(one_server.address)
    return one_server


@contextlib.contextmanager
def connected(address: str) -> Iterator[ControlClient]:
    """A client of the control plane."""
    from moeoffload.control.client import ControlClient  # not before the environment above is set

    with contextlib.closing(ControlClient(address)) as client:
        client.connect(STEP_TIMEOUT_S)
        yield client


def stats(address: str) -> pb.StatsReply:
    """What a server says of itself."""
    with connected(address) as client:
        return client.stats(STEP_TIMEOUT_S)


def wait_until_left(*addresses: str) -> None:
    """No host uses these servers any more."""
    wait_until(lambda: not any(stats(each).leases for each in addresses), "the end of all leases", CLEAN_TIMEOUT_S)


def health_of(address: str, service: str = "") -> str:
    """SERVING or NOT_SERVING."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=STEP_TIMEOUT_S).status
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


@pytest.fixture(scope="session")
def three_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Addresses of three servers that all tests share; each host brings its own experts."""
    folder = tmp_path_factory.mktemp("servers")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ServerProcess(folder)).address for _ in range(3)]


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Runs the real command lines: ``commands.run("moeoffload", "run", ...)``."""
    with contextlib.closing(Commands(tmp_path)) as running:
        yield running


@pytest.fixture
def unused_address() -> Iterator[str]:
    """One that refuses connections and that no other process can be given by chance."""
    with socket.socket() as unused:
        unused.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


@pytest.fixture
def unresolved(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """No name is resolved before the end of the test; holds the answers so far."""
    resolved, answered = threading.Event(), list[bool]()

    def resolve(*_: object, **__: object) -> list[object]:
        answered.append(resolved.wait(STEP_TIMEOUT_S))
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    yield answered
    resolved.set()


@pytest.fixture(scope="session")
def grouped_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server whose kernel does the operations of transformers' grouped_mm."""
    with ServerProcess(tmp_path_factory.mktemp("grouped"), "--kernel", "grouped") as server:
        yield server.address


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """What is freed here has not waited for Python to collect what refers to each other."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def demo_prompt(n_tokens: int, seed: int) -> Any:
    """(1, n_tokens) int64: solved tasks and an open question at the end, cut to length at the front."""
    import tasks
    from transformers import AutoTokenizer

    text = tasks.long_prompt(2 * n_tokens + 100, seed=seed)
    tokens = AutoTokenizer.from_pretrained(DEMO)(text, return_tensors="pt")["input_ids"]
    assert tokens.shape[1] >= n_tokens
    return tokens[:, -n_tokens:]


def local_model(folder: Path, **options: Any) -> Any:
    """The same checkpoint all in this process, with transformers' own grouped experts: the reference for parity."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    options = {"experts_implementation": "grouped_mm", **options}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()
