"""A command on a pseudo-terminal, as a person has it: what it shows, keys, Ctrl-C."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
from pathlib import Path
from typing import Self

from server_processes import ROOT, STEP_TIMEOUT_S

CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """Runs ``program``, after the code ``patch``, with stdin, stdout and stderr on one terminal, or stdout in a file;
    leaving the ``with`` block kills it."""

    def __init__(
        self, program: str, *arguments: object, columns: int = 140, patch: str = "", stdout: Path | None = None
    ) -> None:
        self._file, end = pty.openpty()
        code = f"{patch}\nfrom moeoffload.cli.entry import {program.replace('-', '_')} as main; main()"
        with contextlib.ExitStack() as stack:
            out = end if stdout is None else stack.enter_context(stdout.open("w"))
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *map(str, arguments)], stdin=end, stdout=out, stderr=end, cwd=ROOT,
                env=os.environ | {"TERM": "xterm", "LINES": "60", "COLUMNS": str(columns)}, start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )  # fmt: skip
        os.close(end)
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._file, keys.encode())

    def until(self, words: str | None) -> str:
        """What it shows from now on up to ``words``, or up to its end."""
        text = ""
        while words is None or words not in text:
            ready, _, _ = select.select([self._file], [], [], STEP_TIMEOUT_S)
            assert ready, f"no {words} in {text[-2000:]}"
            try:
                data = os.read(self._file, 65536)
            except OSError:  # how Linux tells that nobody has the other end any more
                data = b""
            if not data:
                assert words is None, text
                break
            text += data.decode(errors="replace")
        self.shown += text
        return text

    def end(self) -> tuple[int, str]:
        """Waits for the end; the exit code, and what it showed last."""
        rest = self.until(None)
        return self.process.wait(STEP_TIMEOUT_S), rest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._file)
