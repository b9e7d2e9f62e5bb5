"""Two contenders that take turns: their processes, the turns, the ratio with its spread."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from servers import Spread, cores

FOLDER = Path(__file__).parent
STARTS = 3


class Opponent:
    """A `contender` process; ``tree`` is the checkout whose package it runs."""

    def __init__(self, checkpoint: Path, options: dict[str, Any], tree: Path) -> None:
        environment = os.environ | {"PYTHONPATH": f"{tree}:{FOLDER}"}
        words = [sys.executable, str(FOLDER / "contender.py"), str(checkpoint)]
        self._process = subprocess.Popen(
            [*words, json.dumps(options | {"cores": cores()})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tree,
        )
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a contender ended; see its message above")
        return json.loads(line)

    def run(self, task: dict[str, Any]) -> float:
        """Seconds that it took for a task."""
        assert self._process.stdin is not None
        print(json.dumps(task), file=self._process.stdin, flush=True)
        return float(self._answer())

    def __enter__(self) -> Opponent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()


@dataclass(frozen=True)
class Result:
    """Two contenders on one task: seconds of each, and how many times as long the second took, turn by turn."""

    task: str
    first_s: Spread
    second_s: Spread
    ratio: Spread
    turns: list[float]


def name_of(task: dict[str, Any]) -> str:
    """How a table calls a task."""
    if task["task"] == "prefill":
        return f"prefill of {task['prompt']}"
    if task["task"] == "decode":
        return f"decode after {task['prompt']}"
    if task["task"] == "hosts":
        return "decode of several hosts"
    name = f"{task['requests']} served"
    if "prompt" not in task:
        return name
    return f"{name} after {task['prompt']}" if task.get("again") else f"{name}, prompts of {task['prompt']}"


def duel(
    first: Callable[[], Opponent],
    second: Callable[[], Opponent],
    tasks: Sequence[dict[str, Any]],
    turns: int,
    starts: int = STARTS,
) -> list[Result]:
    """Lets two contenders take turns at each task, in ``starts`` fresh pairs of processes; at least ``turns`` turns.

    Where a process's memory happens to lie makes it several percent faster or slower for as long as it lives, so turns
    of a single pair show the luck of two processes. One turn of each pair and task does not count.
    """
    pairs: list[list[tuple[float, float]]] = [[] for _ in tasks]
    for start in range(starts):
        with contextlib.ExitStack() as stack:
            # Who comes first changes: with starts, because memory is given out in order; with turns, so that what one
            # leaves in the caches helps both alike.
            opened = [stack.enter_context(each()) for each in ((first, second) if start % 2 == 0 else (second, first))]
            a, b = opened if start % 2 == 0 else reversed(opened)
            for task, found in zip(tasks, pairs, strict=True):
                for turn in range(-(-turns // starts) + 1):
                    if turn % 2:
                        b_s, a_s = b.run(task), a.run(task)
                    else:
                        a_s, b_s = a.run(task), b.run(task)
                    if turn:
                        found.append((a_s, b_s))
    return [_result(task, found) for task, found in zip(tasks, pairs, strict=True)]


def _result(task: dict[str, Any], pairs: Sequence[tuple[float, float]]) -> Result:
    ratios = [b / a for a, b in pairs]
    return Result(
        name_of(task), Spread.of([a for a, _ in pairs]), Spread.of([b for _, b in pairs]), Spread.of(ratios), ratios
    )
