"""Another host of the same servers, in a process of its own, that generates until it is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from fault_kit.processes import CONTEXT, STEP_TIMEOUT_S, redirect, start_process


def _generate(pipe: Connection, log: Path, model: Path, options: dict[str, Any]) -> None:
    """In the child."""
    redirect(log)
    import torch

    from moeoffload.host.session import open_model

    with open_model(model, **options) as offloaded:
        ids = (torch.arange(24) * 7).remainder(200).add(5).unsqueeze(0)
        said = False
        while not pipe.poll():
            tokens = offloaded.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=32, max_new_tokens=32
            )
            if not said:
                pipe.send(tokens[0].tolist())
                said = True


class SecondHost:
    """Started, attached and generating when it is made."""

    def __init__(self, folder: Path, model: Path, experts: Sequence[str], **options: Any) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        options |= {"experts": list(experts), "threads": 1, "device": "cpu"}
        self._process = start_process(_generate, theirs, folder / "second-host.log", model, options)
        theirs.close()
        if not self._pipe.poll(STEP_TIMEOUT_S):
            raise TimeoutError("the second host does not generate")
        self.tokens: list[int] = self._pipe.recv()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """kill -9. Idempotent."""
        if not self._pipe.closed:
            if psutil.pid_exists(self.pid):
                os.kill(self.pid, signal.SIGKILL)
            self._process.join(STEP_TIMEOUT_S)
            self._process.close()
            self._pipe.close()
