"""What tests of whole processes share: command lines, waits with deadlines, and a look at what is left behind."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_processes import MODULES, ROOT, WARM, redirect

SHM = Path("/dev/shm")
RUN_TIMEOUT_S = 100
STEP_TIMEOUT_S = 60
CLEAN_TIMEOUT_S = 20

_MARK = "TEST_RUN_MARK"
_OUR_SHM = re.compile(r"(sem\.)?moeoffload-([0-9]+)-.*")


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = STEP_TIMEOUT_S) -> None:
    """Waits until ``condition()`` is true; fails the test if that takes longer than ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.02)


@dataclass(frozen=True)
class Result:
    """A command that has ended. ``code`` is its exit code, or minus the signal that killed it."""

    code: int
    out: str
    err: str


@dataclass
class Command:
    """A running command; its output goes to files."""

    process: Any
    mark: str
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def ended(self) -> bool:
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll() is not None
        return self.process.exitcode is not None

    def send(self, number: signal.Signals) -> None:
        assert not self.ended, f"ended too early:\n{self.err.read_text()}"
        os.kill(self.pid, number)

    def servers(self) -> list[psutil.Process]:
        """The processes that this command started and that still run, also when it is gone itself."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marked = process.pid != self.pid and process.environ().get(_MARK) == self.mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait(self, timeout_s: float = RUN_TIMEOUT_S) -> Result:
        wait_until(lambda: self.ended, f"the end of process {self.pid}", timeout_s)
        code = self.process.returncode if isinstance(self.process, subprocess.Popen) else self.process.exitcode
        return Result(code, self.out.read_text() if self.out.is_file() else "", self.err.read_text())


@dataclass
class Commands:
    """Runs the command lines with their output in ``folder``, and ends what a failed test leaves running."""

    folder: Path
    _commands: list[Command] = field(default_factory=list)
    _shm_before: set[str] = field(default_factory=lambda: shm_names())

    def start(
        self,
        program: str,
        *arguments: str | Path,
        warm: bool = True,
        stdin: str | bytes | None = "",
        stdout: Path | None = None,
    ) -> Command:
        """Starts ``program`` (moeoffload or moeoffload-expert).

        ``warm`` forks a process that has all imports done; otherwise Python starts afresh, as for a user.
        ``stdin`` is what it reads there; None (warm only) closes it.
        ``stdout`` is where its text goes instead of a file of its own.
        """
        number = len(self._commands)
        out, err = stdout or self.folder / f"out-{number}.txt", self.folder / f"err-{number}.txt"
        source = self.folder / f"in-{number}.txt"
        if stdin is not None:
            source.write_bytes(stdin.encode() if isinstance(stdin, str) else stdin)
        mark = uuid.uuid4().hex
        words = [str(argument) for argument in arguments]
        process: Any
        if warm:
            process = WARM.Process(target=_run_warm, args=(program, words, source, out, err, mark))
            process.start()
        else:
            with source.open() as source_file, out.open("w") as out_file, err.open("w") as err_file:
                process = subprocess.Popen(
                    [sys.executable, "-m", MODULES[program], *words],
                    stdin=source_file,
                    stdout=out_file,
                    stderr=err_file,
                    cwd=ROOT,
                    env=os.environ | {_MARK: mark},
                )
        command = Command(process, mark, out, err)
        self._commands.append(command)
        return command

    def run(self, program: str, *arguments: str | Path, warm: bool = True, stdin: str | bytes | None = "") -> Result:
        """Runs ``program`` to its end and checks that it leaves nothing behind."""
        result = self.start(program, *arguments, warm=warm, stdin=stdin).wait()
        self.check_clean()
        return result

    def check_clean(self, *server_pids: int) -> None:
        """All commands have ended; none of their servers runs; nobody's shared memory has a name any more."""
        for command in self._commands:
            assert command.ended
            wait_until(lambda: not command.servers(), "the end of spawned servers", CLEAN_TIMEOUT_S)
        wait_until(lambda: not self._shm_left(server_pids), "no names of ours in /dev/shm", CLEAN_TIMEOUT_S)

    def _shm_left(self, server_pids: tuple[int, ...]) -> list[str]:
        """New names of processes that are gone, or of ``server_pids``: others may be of somebody else's run."""
        left = []
        for name in shm_names() - self._shm_before:
            match = _OUR_SHM.fullmatch(name)
            assert match is not None
            if int(match[2]) in server_pids or not psutil.pid_exists(int(match[2])):
                left.append(name)
        return left

    def close(self) -> None:
        for command in self._commands:
            for process in command.servers():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if not command.ended:
                os.kill(command.pid, signal.SIGKILL)
            if isinstance(command.process, subprocess.Popen):
                command.process.wait(CLEAN_TIMEOUT_S)
            else:
                command.process.join(CLEAN_TIMEOUT_S)


@contextlib.contextmanager
def running_commands(folder: Path) -> Iterator[Commands]:
    commands = Commands(folder)
    try:
        yield commands
    finally:
        commands.close()


def one_line_error(result: Result, code: int) -> str:
    """The error line of a command that was refused; checks that it is the only thing that was written."""
    assert "Traceback" not in result.err
    lines = [line for line in result.err.splitlines() if line.strip()]
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: "), result.err
    assert result.code == code, result.err
    assert result.out == ""
    return lines[0]


def shm_names() -> set[str]:
    """What is in /dev/shm of any process of ours."""
    return {entry.name for entry in SHM.iterdir() if _OUR_SHM.fullmatch(entry.name)}


def _run_warm(program: str, words: list[str], source: Path, out: Path, err: Path, mark: str) -> None:
    """In the child: what the console script does, with the standard streams on files."""
    os.environ[_MARK] = mark
    os.chdir(ROOT)
    redirect(out, err)
    # multiprocessing has put another stdin there; without a file it is what Python has when it finds it closed.
    sys.stdin = source.open() if source.exists() else None  # type: ignore[assignment]
    sys.argv = [program, *words]
    importlib.import_module(MODULES[program]).main()
