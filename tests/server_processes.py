"""Processes of the real command lines for tests: started as a user does, or forked where all imports are done."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo" / "checkpoint"
MODULES = {"moeoffload": "moeoffload.cli.host_app", "moeoffload-expert": "moeoffload.cli.expert_app"}
# Its children start with everything imported: a process of its own for each command, without seconds of imports.
WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(
    [*MODULES.values(), "moeoffload.host.generate", "moeoffload.expert_server.server", "rich.progress"]
)

READY_TIMEOUT_S = 120
STEP_TIMEOUT_S = 60
END_TIMEOUT_S = 40.0
"""Longer than a server waits for its hosts."""
_numbers = itertools.count()


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = STEP_TIMEOUT_S) -> None:
    """Waits until ``condition()`` is true.

    Raises:
        TimeoutError: it is not within ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.01)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


class WarmProcess:
    """A fork that runs ``body(*arguments)``, with what tests use of `subprocess.Popen`; it ends with this process.

    Its output goes to the ends of the files ``out`` and ``err``, its input is a pipe that `close` closes.
    """

    def __init__(self, out: Path, err: Path, body: Callable[..., None], *arguments: Any) -> None:
        theirs, self.stdin = WARM.Pipe(duplex=False)
        self._process = WARM.Process(target=_in_fork, args=(theirs, out, err, body, arguments), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and (code := self._process.exitcode) is not None:
            self._code = code
            self._process.close()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            self._process.join(timeout)
        if (code := self.poll()) is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout:g} s")
        return code

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends at this moment
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PipedProcess(WarmProcess):
    """A fork that runs ``body(pipe, *arguments)``; the other end of the pipe is here."""

    def __init__(self, log: Path, body: Callable[..., None], *arguments: Any) -> None:
        self.log = log
        self.pipe, theirs = WARM.Pipe()
        super().__init__(log, log, body, theirs, *arguments)
        theirs.close()

    def asks(self, *question: Any) -> Any:
        """Sends the question, if there is one; returns what the process says next.

        Raises:
            RuntimeError: it has ended, or says nothing; the message holds the end of its log.
        """
        with contextlib.suppress(EOFError, OSError):
            for each in question:
                self.pipe.send(each)
            if self.pipe.poll(STEP_TIMEOUT_S):
                return self.pipe.recv()
        raise RuntimeError(f"process {self.pid} does not answer:\n{read(self.log)[-4000:]}")

    def close(self) -> None:
        """kill -9. Idempotent."""
        end(self)
        self.pipe.close()


Process = WarmProcess | subprocess.Popen[str]


def end(process: Process) -> None:
    """Kills what still runs, and frees what belongs to it."""
    process.kill()
    process.wait(END_TIMEOUT_S)
    if process.stdin is not None:
        process.stdin.close()


def run_program(program: str, words: list[str], before: str | Callable[[], None] = "") -> None:
    """In a fork: what the console script does, after ``before`` (code or a function)."""
    sys.argv = [program, *words]
    if callable(before):
        before()
    else:
        exec(before, {})
    importlib.import_module(MODULES[program]).main()


def _in_fork(stdin: Connection, out: Path, err: Path, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.chdir(ROOT)
    os.dup2(stdin.fileno(), 0)
    stdin.close()
    sys.stdin = os.fdopen(0, closefd=False)
    for number, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    body(*arguments)


class ServerProcess:
    """A ``moeoffload-expert`` on a free port, and its successors at the same address. Logs go to ``folder``.

    ``patch`` is run in the process, for what no option can bring about: code, or a function. Unless ``warm``, Python
    starts afresh, and runs the code before all imports. A context manager; leaving it ends the server by SIGTERM.
    """

    process: Process

    def __init__(self, folder: Path, *options: str, patch: str | Callable[[], None] = "", warm: bool = True) -> None:
        self.address = "127.0.0.1:0"
        self.log = folder / f"server-{next(_numbers)}.log"
        self._options, self._patch, self._warm = options, patch, warm
        self.start()

    @property
    def log_text(self) -> str:
        """What all processes at this address have logged so far."""
        return self.log.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, *more: str) -> None:
        """Starts a process at the address, with ``more`` options; waits until it is ready."""
        words = ["--listen", self.address, "--exit-with-stdin", "--device", "cpu", "--threads", "1"]
        words += ["--memory-gib", "2", *self._options, *more]
        out = self.log.with_suffix(".out")
        out.unlink(missing_ok=True)
        if self._warm:
            self.process = WarmProcess(out, self.log, run_program, "moeoffload-expert", words, self._patch)
        else:
            code = f"{self._patch}\nfrom moeoffload.cli.expert_app import main\nmain()"
            with out.open("w") as stdout, self.log.open("a") as stderr:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", code, *words],
                    stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, text=True, cwd=ROOT,
                )  # fmt: skip
        wait_until(lambda: "\n" in read(out) or self.process.poll() is not None, "a server's address", READY_TIMEOUT_S)
        ready = re.search(r"ready on (\S+)", read(out))
        if ready is None:
            end(self.process)
            raise RuntimeError(f"the server did not start:\n{self.log_text}")
        self.address = ready.group(1)

    def ports(self) -> list[int]:
        """TCP ports it listens at."""
        connections = psutil.Process(self.pid).net_connections("tcp")
        return sorted({each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN})

    def kill(self) -> None:
        """kill -9, unless it has ended by itself."""
        end(self.process)

    def drain(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, whatever state it is in.

        Raises:
            TimeoutError: it does not heed SIGTERM.
        """
        try:
            self.process.send_signal(signal.SIGCONT)
            self.drain()
        finally:
            end(self.process)
