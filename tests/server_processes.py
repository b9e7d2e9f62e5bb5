"""Expert server processes for tests: started afresh, as a user does, or forked where all imports are done."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).parents[1]
MODULES = {"moeoffload": "moeoffload.cli.host_app", "moeoffload-expert": "moeoffload.cli.expert_app"}
# Its children start with everything imported: a process of its own for each command, without seconds of imports.
WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(
    [*MODULES.values(), "moeoffload.host.generate", "moeoffload.expert_server.server", "rich.progress"]
)

KILLED_S = 30.0


class Process(Protocol):
    """What tests use of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None:
        """Ends what still runs, and frees what belongs to it."""


class FreshServer(subprocess.Popen[str]):
    """Python starts and imports everything: seconds."""

    def __init__(self, words: list[str], patch: str, out: Path, log: Path) -> None:
        with out.open("w") as stdout, log.open("w") as stderr:
            command = [sys.executable, "-c", f"{patch}\nfrom moeoffload.cli.expert_app import main\nmain()", *words]
            super().__init__(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, text=True, cwd=ROOT)

    def close(self) -> None:
        self.kill()
        self.wait(KILLED_S)
        assert self.stdin is not None
        self.stdin.close()


class WarmServer:
    """A fork of a process that has imported everything."""

    def __init__(self, words: list[str], out: Path, log: Path) -> None:
        stdin, self._stdin = WARM.Pipe(duplex=False)
        self._process = WARM.Process(target=_serve, args=(words, stdin, out, log))
        self._process.start()
        stdin.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError(f"server {self.pid} still runs after {timeout:g} s")
        return code

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.wait(KILLED_S)
        self._stdin.close()
        self._process.close()


def redirect(out: Path, err: Path) -> None:
    """In a fork: stdout and stderr go to these files."""
    for number, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, number)
        os.close(opened)


def _serve(words: list[str], stdin: Connection, out: Path, log: Path) -> None:
    """In the fork: what the console script does."""
    os.chdir(ROOT)
    redirect(out, log)
    os.dup2(stdin.fileno(), 0)
    stdin.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv = ["moeoffload-expert", *words]
    from moeoffload.cli.expert_app import main

    main()
