"""What tests share: real expert server processes, the demo checkpoint, local reference models."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_lines import Commands, running_commands, wait_until
from server_processes import FreshServer, Process, WarmServer

# Tests run several processes on few cores; one thread each is what a shared machine can bear.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():  # Triton asks when it is first imported, whoever does that
    os.environ.setdefault("TRITON_INTERPRET", "1")
for name in [name for name in os.environ if name.startswith(("MOEOFFLOAD_", "DFLASH_MOE_"))]:
    del os.environ[name]

# A shell starts background jobs with SIGINT ignored, which processes hand on; tests of Ctrl-C need it as in a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "demo"))
DEMO = ROOT / "examples" / "demo" / "checkpoint"
READY_TIMEOUT_S = 120


@dataclass
class RunningServer:
    """A ``moeoffload-expert`` process that has printed its address; its log is a file."""

    process: Process
    address: str
    log: Path

    @property
    def log_text(self) -> str:
        return self.log.read_text()


@contextlib.contextmanager
def expert_server(folder: Path, *options: str, patch: str = "", warm: bool = True) -> Iterator[RunningServer]:
    """Starts a real server on a free port and stops it with SIGTERM; its log goes to ``folder``.

    ``patch`` is code that the process runs before all imports, for what no option can bring about.
    ``warm`` forks a process that has all imports done; otherwise, and with a patch, Python starts afresh.
    """
    words = ["--listen", "127.0.0.1:0", "--exit-with-stdin", "--device", "cpu", "--threads", "1", *options]
    if "--memory-gib" not in options:
        words += ["--memory-gib", "2"]
    log = folder / f"server-{len(list(folder.glob('server-*.log')))}.log"
    out = log.with_suffix(".out")
    process: Process = WarmServer(words, out, log) if warm and not patch else FreshServer(words, patch, out, log)
    with contextlib.closing(process):
        wait_until(lambda: "\n" in read(out) or process.poll() is not None, "a server's address", READY_TIMEOUT_S)
        ready = re.search(r"ready on (\S+)", read(out))
        assert ready is not None, read(log)
        try:
            yield RunningServer(process, ready.group(1), log)
        finally:
            process.terminate()
            process.wait(timeout=30)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


StartServer = Callable[..., RunningServer]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers that live as long as the test: ``start_server("--batch-capacity", "64")``."""
    with contextlib.ExitStack() as stack:
        yield lambda *options, **how: stack.enter_context(expert_server(tmp_path, *options, **how))


@pytest.fixture(scope="session")
def three_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Addresses of three servers that all tests share; each host brings its own experts."""
    folder = tmp_path_factory.mktemp("servers")
    folders = [folder / str(number) for number in range(3)]
    for each in folders:
        each.mkdir()
    # Each needs seconds to import torch: they start side by side.
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        servers = [expert_server(each) for each in folders]
        running = list(pool.map(lambda server: server.__enter__(), servers))
        for server in servers:
            stack.push(server.__exit__)
        yield [server.address for server in running]


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Runs the real command lines: ``commands.run("moeoffload", "run", ...)``."""
    with running_commands(tmp_path) as running:
        yield running


@pytest.fixture(scope="session")
def grouped_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server whose kernel does the operations of transformers' grouped_mm."""
    with expert_server(tmp_path_factory.mktemp("grouped"), "--kernel", "grouped") as server:
        yield server.address


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
