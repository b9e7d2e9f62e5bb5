"""Expert servers that the host starts on its own machine: one process each, which ends when the host ends.

This module does not import torch, so that a server can import it at the same time as the host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Final

from moeoffload.config import ExpertServerSettings, HostSettings
from moeoffload.errors import DeadlineError, ServerError, SettingError
from moeoffload.last_resort import answer_within
from moeoffload.native import has_gpu_driver

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Spawned = Callable[[], list[str]]
"""Waits until servers are ready and returns their addresses. Raises ServerError: see `_ready_address`."""
_READY: Final = re.compile(rb"ready on (\S+)")
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 10.0


def server_devices(settings: HostSettings, host_device: torch.device) -> list[str]:
    """Returns the device of each server to start: all spare GPUs (only GPU ``gpu`` if that is set), or the CPU."""
    if settings.gpu is not None:
        return [f"cuda:{settings.gpu}"]
    import torch

    used = host_device.index if host_device.type == "cuda" else None
    spare = [f"cuda:{i}" for i in range(torch.cuda.device_count()) if i != used]
    return spare or ["cpu"]


def devices_before_torch(settings: HostSettings) -> list[str]:
    """Returns what `server_devices` will, if a server is needed in any case and torch need not be asked; else none."""
    if settings.experts or settings.local_experts_gib or settings.device not in ("auto", "cpu"):
        return []
    if settings.gpu is not None:
        return [f"cuda:{settings.gpu}"]
    return [] if has_gpu_driver() else ["cpu"]


@contextlib.contextmanager
def spawned_servers(settings: HostSettings, devices: Sequence[str]) -> Iterator[Spawned]:
    """Starts one server on each device and yields what waits for them. Afterwards it stops them, and kills those that
    do not stop in time.

    Logs go to ``work_dir``, or to temporary files if it is not set.
    """
    logger.info("starting %s", ", ".join(f"an expert server on {device}" for device in devices))
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        logs: list[IO[bytes]] = []
        stack.callback(_stop, processes)
        for number, device in enumerate(devices):
            logs.append(stack.enter_context(_log_file(settings, number)))
            processes.append(_start(settings, device, logs[-1]))

        def wait() -> list[str]:
            deadline = time.monotonic() + START_TIMEOUT_S
            return [_ready_address(process, log, deadline) for process, log in zip(processes, logs, strict=True)]

        yield wait


def _log_file(settings: HostSettings, number: int) -> IO[bytes]:
    """A temporary file has no name: nothing is left of it, also where a signal ends the host at once."""
    if settings.work_dir is None:
        return tempfile.TemporaryFile()
    settings.work_dir.mkdir(parents=True, exist_ok=True)
    return (settings.work_dir / f"expert-server-{number}.log").open("w+b")


def _start(settings: HostSettings, device: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "moeoffload.cli.expert_app", "--exit-with-stdin"]
    command += ["--listen", "127.0.0.1:0", "--device", device, "--slots", str(max(4, settings.slots))]
    for option, value in (
        ("--batch-capacity", settings.batch_capacity),
        ("--shared-bytes", settings.shared_bytes or None),
        ("--threads", settings.threads),
        ("--memory-gib", settings.server_memory_gib),
    ):
        command += [option, str(value)] if value is not None else []
    # A variable meant for the host may mean something else to a server: servers get their settings as options only.
    names = {name for info in ExpertServerSettings.infos() for name in info.env_names}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        # Ctrl-C in the terminal reaches the host alone, which then stops its servers.
        start_new_session=True,
    )


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()  # first: a server that is only terminated waits for its hosts
        process.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        with process:  # closes its output in the end, and waits
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def _ready_address(process: subprocess.Popen[bytes], log: IO[bytes], deadline: float) -> str:
    """Returns the address in the line that a server prints when it is ready.
    Raises SettingError: the server refused its settings, which the host gave it; ServerError: it ended for another
    reason (both quote the last line of its log); DeadlineError: it was not ready in time."""
    stdout = process.stdout
    assert stdout is not None

    def find() -> re.Match[bytes] | None:
        return next(filter(None, map(_READY.search, stdout)), None)  # what Python is set to import may print, too

    try:
        match = answer_within(max(0.0, deadline - time.monotonic()), "server-ready", find)
    except TimeoutError:
        raise DeadlineError(f"a spawned expert server was not ready within {START_TIMEOUT_S:g} s") from None
    if match is None:
        process.wait(STOP_TIMEOUT_S)
        log.seek(0)
        words = log.read().decode(errors="replace").strip().splitlines()
        why = (words[-1] if words else "it has ended").removeprefix("error: ")
        if process.returncode == SettingError.exit_code:
            raise SettingError(f"the expert server that is started here: {why}")
        raise ServerError(f"a spawned expert server did not start: {why}")
    return match[1].decode()
