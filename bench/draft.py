"""What a checkpoint's own draft head brings: ``python bench/draft.py --checkpoint DIR --json FILE``.

Greedy answers to held-out tasks, with 0 guesses, with fixed numbers, and with as many as are measured to pay, in turns
in one process. A pass of several rows and the head's own work cost time; a row's limit is what its tokens per pass
would bring if both were free. Then the head is spoilt, so that it guesses nothing right: what does it cost to have
noticed that? All answers must be equal. Without ``--checkpoint`` the demo checkpoint gets a head,
which takes some minutes (``examples/demo/train_head.py``).
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from devices import CPU, HostDevice, ServerDevice
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, expert_server, write_json

from moeoffload import OffloadedModel, open_model
from moeoffload.config import OWN_HEAD
from moeoffload.host.generate import generate, prepare_prompt
from moeoffload.host.speculative import GuessLength

DEMO = Path(__file__).parents[1] / "examples" / "demo"
SPOILT = "spoilt"
ADAPTIVE = "as many as pay"


@dataclass(frozen=True)
class Row:
    """``head``: as trained, or spoilt. Tokens per second, the first of each answer aside; ``ratio`` to those without
    guesses in the same turn, and what
    it could be at most."""

    transport: str
    head: str
    guesses: str
    tokens_per_s: Spread
    ratio: Spread
    limit: float
    acceptance: float
    tokens_per_pass: float


def answer(offloaded: OffloadedModel, prompts: list[str]) -> tuple[list[list[int]], float]:
    """All answers, and their tokens per second."""
    offloaded.recorder.reset()
    answers = [generate(offloaded, prepare_prompt(offloaded, text, chat=False), io.StringIO()) for text in prompts]
    tokens = [each.tokens.tolist() for each in answers]
    return tokens, sum(len(each) - 1 for each in tokens) / sum(each.further_s for each in answers)


def measure(offloaded: OffloadedModel, transport: str, head: str, prompts: list[str], repeats: int) -> list[Row]:
    """The rows of one transport and head."""
    fixed = (0, 4) if head == SPOILT else (0, 1, 2, 4)
    numbers = {str(number): GuessLength(number, adaptive=False) for number in fixed}
    numbers[ADAPTIVE] = GuessLength(4, adaptive=True)
    speeds: dict[str, list[float]] = {name: [] for name in numbers}
    details: dict[str, dict[str, float]] = {}
    expected, _ = answer(offloaded, prompts)
    for _ in range(repeats):
        for name, lengths in numbers.items():
            offloaded.guess_length = lengths
            tokens, speed = answer(offloaded, prompts)
            if tokens != expected:
                raise SystemExit(f"{name} guesses changed the tokens")
            speeds[name].append(speed)
            details[name] = offloaded.report().guesses or {}
    rows = []
    for name, mine in speeds.items():
        ratio = Spread.of([each / plain for each, plain in zip(mine, speeds["0"], strict=True)])
        found = details[name]
        # The pass over the prompt, which gives the first token, is no part of the rate.
        per_pass = (found["tokens"] - len(prompts)) / (found["passes"] - len(prompts))
        rows.append(Row(transport, head, name, Spread.of(mine), ratio, per_pass, found["acceptance"], per_pass))
    return rows


def main(
    checkpoint: Annotated[
        Path | None, typer.Option(help="A checkpoint with a draft head; default: the demo's.")
    ] = None,
    prompts: Annotated[int, typer.Option(help="Prompts of a turn.")] = 60,
    repeats: Annotated[int, typer.Option(help="Turns.")] = 7,
    steps: Annotated[int, typer.Option(help="Training steps of the demo's head.")] = 800,
    json: Annotated[Path | None, typer.Option(help="File for the results.")] = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Measure answers with and without guesses of the own head."""
    sys.path.insert(0, str(DEMO))
    import tasks

    host_core, server_core = cores()
    with tempfile.TemporaryDirectory() as folder:
        if checkpoint is None:
            checkpoint = Path(folder)
            train = [sys.executable, str(DEMO / "train_head.py"), str(DEMO / "checkpoint"), folder]
            subprocess.run([*train, "--steps", str(steps)], check=True)
        os.sched_setaffinity(0, {host_core})
        rows = []
        with expert_server(server_core, device=server_device) as address:
            for transport in ("shared", "stream"):
                with open_model(
                    checkpoint,
                    experts=[address],
                    device=host_device,
                    threads=1,
                    transport=transport,
                    draft=OWN_HEAD,
                    max_new_tokens=32,
                ) as offloaded:
                    texts = tasks.prompts(prompts, seed=1)
                    rows += measure(offloaded, transport, "trained", texts, repeats)
                    torch.nn.init.zeros_(offloaded.draft.layers[0].post_norm.weight)  # all tokens are as likely
                    rows += measure(offloaded, transport, SPOILT, texts, repeats)
    table = Table("transport", "head", "guesses", "tok/s", "ratio", "limit", "acceptance", "tokens per pass")
    for row in rows:
        share = f"{100 * row.acceptance:.0f} %"
        speed, ratio = f"{row.tokens_per_s:.0f}", f"{row.ratio:.2f}"
        table.add_row(
            row.transport, row.head, row.guesses, speed, ratio, f"{row.limit:.2f}", share, f"{row.tokens_per_pass:.2f}"
        )
    Console(width=120).print(table)
    if json is not None:
        settings: dict[str, Any] = {"prompts": prompts, "repeats": repeats, "layers": len(offloaded.checkpoint.layers)}
        settings |= {"host_device": host_device, "server_device": server_device}
        write_json(json, "draft", settings, rows)


if __name__ == "__main__":
    typer.run(main)
