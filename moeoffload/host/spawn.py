"""Expert servers that the host starts on its own machine: one process each, which ends when the host ends."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import torch

from moeoffload.config import ExpertServerSettings, HostSettings, TransportChoice
from moeoffload.errors import DeadlineError, ServerError, SettingError

_READY: Final = re.compile(r"ready on (\S+)")
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True)
class ServerSpec:
    """The options of one spawned server that do not come from the settings."""

    device: str
    transport: TransportChoice = TransportChoice.AUTO


def default_specs(settings: HostSettings, host_device: torch.device) -> list[ServerSpec]:
    """Returns one server for each spare GPU (only GPU ``gpu`` if that is set), or one on the CPU."""
    if settings.gpu is not None:
        return [ServerSpec(f"cuda:{settings.gpu}")]
    used = host_device.index if host_device.type == "cuda" else None
    spare = [f"cuda:{i}" for i in range(torch.cuda.device_count()) if i != used]
    return [ServerSpec(device) for device in spare] or [ServerSpec("cpu")]


class SpawnedServers:
    """Starts servers and stops them on `close`. Logs go to ``work_dir``, or to a temporary folder if it is not set."""

    def __init__(self, settings: HostSettings, specs: Sequence[ServerSpec]) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.addresses: list[str] = []
        if settings.work_dir is None:
            self._folder = tempfile.TemporaryDirectory(prefix="moeoffload-")
            folder = Path(self._folder.name)
        else:
            folder = settings.work_dir
            folder.mkdir(parents=True, exist_ok=True)
        try:
            for number, spec in enumerate(specs):
                self._start(settings, spec, folder / f"expert-server-{number}.log")
            deadline = time.monotonic() + START_TIMEOUT_S
            self.addresses = [
                _ready_address(process, Path(log.name), deadline)
                for process, log in zip(self._processes, self._logs, strict=True)
            ]
        except BaseException:
            self.close()
            raise

    def _start(self, settings: HostSettings, spec: ServerSpec, log_path: Path) -> None:
        command = [sys.executable, "-m", "moeoffload.cli.expert_app", "--exit-with-stdin"]
        command += ["--listen", "127.0.0.1:0", "--device", spec.device, "--transport", spec.transport.value]
        command += ["--slots", str(max(4, settings.slots))]
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
        log = log_path.open("wb")
        self._logs.append(log)
        self._processes.append(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                # Ctrl-C in the terminal reaches the host alone, which then stops its servers.
                start_new_session=True,
            )
        )

    def close(self) -> None:
        """Stops all servers; kills those that do not stop in time. Idempotent."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
            process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for log in self._logs:
            log.close()
        self._processes.clear()
        self._logs.clear()
        if self._folder is not None:
            self._folder.cleanup()


def _ready_address(process: subprocess.Popen[bytes], log: Path, deadline: float) -> str:
    """Returns the address in the line that a server prints when it is ready.
    Raises SettingError: the server refused its settings, which the host gave it; ServerError: it ended for another
    reason (both quote the last line of its log); DeadlineError: it was not ready in time."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise DeadlineError(f"a spawned expert server was not ready within {START_TIMEOUT_S:g} s")
    line = process.stdout.readline().decode(errors="replace")
    match = _READY.search(line)
    if match is None:
        process.wait(STOP_TIMEOUT_S)
        words = log.read_text(errors="replace").strip().splitlines()
        why = (words[-1] if words else line.strip()).removeprefix("error: ")
        if process.returncode == SettingError.exit_code:
            raise SettingError(f"the expert server that is started here: {why}")
        raise ServerError(f"a spawned expert server did not start: {why}")
    return match.group(1)
