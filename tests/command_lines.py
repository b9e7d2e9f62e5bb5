"""What tests of whole processes share: command lines, waits with deadlines, and a look at what is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from server_processes import ROOT, STEP_TIMEOUT_S, Process, WarmProcess, end, read, run_program, wait_until

__all__ = [
    "CLEAN_TIMEOUT_S", "ROOT", "RUN_TIMEOUT_S", "STEP_TIMEOUT_S", "Command", "Commands", "Result", "one_line_error",
    "run_python", "shm_left", "shm_names", "wait_until",
]  # fmt: skip

RUN_TIMEOUT_S = 100
CLEAN_TIMEOUT_S = 20

_MARK = "TEST_RUN_MARK"
_OUR_SHM = re.compile(r"(sem\.)?moeoffload-([0-9]+)-.*")


@dataclass(frozen=True)
class Result:
    """A command that has ended. ``code`` is its exit code, or minus the signal that killed it."""

    code: int
    out: str
    err: str


@dataclass
class Command:
    """A running command; its output goes to files."""

    process: Process
    mark: str
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def send(self, number: signal.Signals) -> Command:
        """Sends the signal; returns this command."""
        assert not self.ended, f"ended too early:\n{self.err.read_text()}"
        os.kill(self.pid, number)
        return self

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
        return Result(self.process.wait(), read(self.out) if self.out.is_file() else "", read(self.err))


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
        patch: str = "",
    ) -> Command:
        """Starts ``program`` (moeoffload or moeoffload-expert).

        ``warm`` forks a process that has all imports done; otherwise Python starts afresh, as for a user.
        ``stdin`` is what it reads there; None (warm only) closes it.
        ``stdout`` is where its text goes instead of a file of its own.
        ``patch`` is code that it runs first (warm only).
        """
        number, mark = len(self._commands), uuid.uuid4().hex
        out, err = stdout or self.folder / f"out-{number}.txt", self.folder / f"err-{number}.txt"
        source = self.folder / f"in-{number}.txt"
        if stdin is not None:
            source.write_bytes(stdin.encode() if isinstance(stdin, str) else stdin)
        words = [str(argument) for argument in arguments]
        process: Process
        if warm:
            process = WarmProcess(out, err, _run_marked, program, words, patch, source, mark)
        else:
            name = program.replace("-", "_")
            code = f"from moeoffload.cli.entry import {name}; {name}()"  # the console script
            with source.open() as source_file, out.open("w") as out_file, err.open("w") as err_file:
                process = subprocess.Popen(
                    [sys.executable, "-c", code, *words],
                    stdin=source_file, stdout=out_file, stderr=err_file, text=True, cwd=ROOT,
                    env=os.environ | {_MARK: mark},
                )  # fmt: skip
        command = Command(process, mark, out, err)
        self._commands.append(command)
        return command

    def run(self, program: str, *arguments: str | Path, **how: Any) -> Result:
        """Runs ``program`` to its end as `start` does, and checks that it leaves nothing behind."""
        result = self.start(program, *arguments, **how).wait()
        self.check_clean()
        return result

    def check_clean(self, *server_pids: int) -> None:
        """All commands have ended; none of their servers runs; nobody's shared memory has a name any more."""
        for command in self._commands:
            assert command.ended
            wait_until(lambda: not command.servers(), "the end of spawned servers", CLEAN_TIMEOUT_S)
        wait_until(lambda: not shm_left(self._shm_before, *server_pids), "no names in /dev/shm", CLEAN_TIMEOUT_S)

    def close(self) -> None:
        for command in self._commands:
            for process in command.servers():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            end(command.process)


def run_python(code: str, *arguments: str, **variables: str | None) -> Result:
    """Runs ``code`` in a Python of its own, with these variables beside those of this process; None takes one away."""
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, cwd=ROOT, env=environment)
    return Result(done.returncode, done.stdout, done.stderr)


def one_line_error(result: Result, code: int) -> str:
    """The error line of a command that was refused; nothing else was written but what a server says it does."""
    assert "Traceback" not in result.err
    lines = [line for line in result.err.splitlines() if line.strip() and " INFO moeoffload." not in line]
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: "), result.err
    assert result.code == code, result.err
    assert result.out == ""
    return lines[0]


def shm_names() -> set[str]:
    """What is in /dev/shm of any process of ours."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if _OUR_SHM.fullmatch(entry.name)}


def shm_left(before: set[str], *pids: int) -> list[str]:
    """New names in /dev/shm of processes that are gone or among ``pids``: others may be of somebody else's run."""
    found = {name: int(_OUR_SHM.sub(r"\2", name)) for name in shm_names() - before}
    return [name for name, pid in found.items() if pid in pids or not psutil.pid_exists(pid)]


def _run_marked(program: str, words: list[str], patch: str, source: Path, mark: str) -> None:
    """In the fork: without a source stdin is what Python has when it finds it closed."""
    os.environ[_MARK] = mark
    sys.stdin = source.open() if source.exists() else None  # type: ignore[assignment]
    run_program(program, words, patch)
