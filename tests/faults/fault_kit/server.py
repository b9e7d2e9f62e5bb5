"""One expert server at a fixed address that is started, killed, stopped, drained, restarted and told to misbehave."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Final

import psutil

from fault_kit.bad_replies import spoil_replies
from fault_kit.processes import CONTEXT, STEP_TIMEOUT_S, redirect, start_process, wait_for

OPTIONS: Final = ("--device", "cpu", "--threads", "1", "--memory-gib", "1", "--exit-with-stdin")
STACKS_S: Final = 0.5
DRAIN_TIMEOUT_S: Final = 40.0
"""Longer than a server waits for its hosts."""
_numbers = itertools.count()


def _serve(stdin: Connection, orders: Connection, log: Path, words: list[str]) -> None:
    """In the child: what the console script does, with replies that can be spoiled."""
    redirect(log)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.dup2(stdin.fileno(), 0)
    stdin.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv = ["moeoffload-expert", *words]
    spoil_replies(orders)
    from moeoffload.cli.expert_app import main

    main()


class ServerProcess:
    """A ``moeoffload-expert`` process and its successors on the same port. Logs go to ``folder``."""

    def __init__(self, folder: Path, *options: str, host: str = "127.0.0.1") -> None:
        self.host = host
        self.port = 0
        self.log = folder / f"server-{next(_numbers)}.log"
        self._options = options
        self._process: ForkServerProcess | None = None
        self._stdin: Connection | None = None
        self._orders: Connection | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def log_text(self) -> str:
        """What all processes at this address have logged so far."""
        return self.log.with_suffix(".err").read_text()

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def start(self, *more: str) -> None:
        """Starts a process at the address, with ``more`` options; waits until it is ready."""
        assert not self.runs
        stdin, self._stdin = CONTEXT.Pipe(duplex=False)
        theirs, self._orders = CONTEXT.Pipe()
        words = ["--listen", f"{self.host}:{self.port}", *OPTIONS, *self._options, *more]
        n_before = self._ready_lines()
        self._process = start_process(_serve, stdin, theirs, self.log, words)
        stdin.close()
        theirs.close()
        wait_for(lambda: self._ready_lines() > n_before or not self.runs, "the start of a server")
        if not self.runs:
            raise RuntimeError(f"the server did not start:\n{self.log_text}")
        self.port = int(self.log.read_text().splitlines()[-1].split(" on ")[1].split()[0].rpartition(":")[2])

    def _ready_lines(self) -> int:
        return self.log.read_text().count("ready on") if self.log.exists() else 0

    def ports(self) -> list[int]:
        """TCP ports it listens at, the control port first."""
        found = {
            connection.laddr.port
            for connection in psutil.Process(self.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        return [self.port, *sorted(found - {self.port})]

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> int:
        """SIGTERM; returns the exit code."""
        return self._end(signal.SIGTERM, timeout_s)

    def tell(self, number: signal.Signals) -> None:
        """Sends it and does not wait."""
        os.kill(self.pid, number)

    def pause(self) -> None:
        """SIGSTOP: the process is there and does nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def spoil(self, how: str, n: int = 1) -> None:
        """Spoils the next ``n`` replies; see `bad_replies.SPOILERS`."""
        assert self._orders is not None
        self._orders.send((how, n))
        assert self._orders.poll(STEP_TIMEOUT_S)
        with contextlib.suppress(EOFError):  # it may die of the order before it says that it has it
            self._orders.recv()

    def reap(self, timeout_s: float = STEP_TIMEOUT_S) -> int:
        """Waits for a process that ends by itself; returns its exit code, or minus the signal that killed it."""
        process = self._process
        assert process is not None
        process.join(timeout_s)
        code = process.exitcode
        if code is None:
            raise TimeoutError(f"server {self.address} did not end within {timeout_s:g} s\n{self._stacks()}")
        for pipe in (self._stdin, self._orders):
            if pipe is not None:
                pipe.close()
        process.close()
        self._process = self._stdin = self._orders = None
        return code

    def _stacks(self) -> str:
        """Where the threads of the process are, and what it logged last."""
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(STACKS_S)
        return self.log_text[-6000:]

    def _end(self, number: signal.Signals, timeout_s: float = STEP_TIMEOUT_S) -> int:
        os.kill(self.pid, number)
        return self.reap(timeout_s)

    def close(self) -> None:
        """Ends the process, whatever state it is in. Idempotent."""
        if self._process is None:
            return
        if self.runs:
            with contextlib.suppress(ProcessLookupError):
                self.resume()
                os.kill(self.pid, signal.SIGTERM)
            self._process.join(10)
            if self.runs:
                self._process.kill()
        self.reap()
