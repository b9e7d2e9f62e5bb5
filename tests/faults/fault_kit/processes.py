"""Real processes that start at once: forks of one that has imported everything, and has no threads."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[3]
STEP_TIMEOUT_S: Final = 60.0

CONTEXT: Final = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "moeoffload.cli.expert_app",
        "moeoffload.cli.host_app",
        "moeoffload.expert_server.server",
        "moeoffload.host.generate",
        "fault_kit.bad_replies",
        "fault_kit.proxy",
        "rich.progress",
    ]
)


def start_process(body: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """A process that runs ``body(*arguments)``; it ends with this one at the latest."""
    process = CONTEXT.Process(target=body, args=arguments, daemon=True)
    process.start()
    return process


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = STEP_TIMEOUT_S) -> Any:
    """Waits until ``condition()`` is true and returns it.

    Raises:
        TimeoutError: it is not within ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.01)
    return value


def redirect(log: Path) -> None:
    """In a child: stdout and stderr go to ``log`` and ``log``.err."""
    for number, path in ((1, log), (2, log.with_suffix(".err"))):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(ROOT)
