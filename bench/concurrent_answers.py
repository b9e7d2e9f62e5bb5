"""Are answers of many requests at once those of one at a time? ``python bench/concurrent_answers.py --json FILE``.

The demo checkpoint's held-out prompts, greedy, each alone through ``generate`` and all of them through the engine of
`moeoffload serve` with many in flight. Rows of several prompts are multiplied together, and torch rounds by the shape
of a product, so answers can differ where two tokens are as good as equally likely; how many do is what this counts.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from devices import CPU, HostDevice, ServerDevice
from rich.console import Console
from rich.table import Table
from servers import cores, expert_server, write_json

from moeoffload import OffloadedModel, open_model
from moeoffload.config import ServeSettings
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.request import Progress, SamplingOptions

DEMO = Path(__file__).parents[1] / "examples" / "demo"
N_TOKENS = 24
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Row:
    """One way to ask many at once, against one at a time; accuracies in percent of all prompts."""

    transport: str
    prompts: int
    in_flight: int
    accuracy_alone: float
    accuracy_together: float
    same_tokens_percent: float


def together(engine: ServingEngine, prompts: list[list[int]], in_flight: int) -> list[list[int]]:
    """The answers, with so many requests open at any time."""
    answers: list[list[int]] = [[] for _ in prompts]
    room = threading.Semaphore(in_flight)
    options = SamplingOptions(max_tokens=N_TOKENS, temperature=0)

    def take(number: int, progress: Progress) -> None:
        if progress.choice is not None:
            answers[number].append(progress.choice.token)
        if progress.finish is not None:
            room.release()

    for number, prompt in enumerate(prompts):
        room.acquire(timeout=TIMEOUT_S)
        engine.submit(prompt, options, lambda progress, number=number: take(number, progress))  # type: ignore[misc]
    for _ in range(in_flight):
        room.acquire(timeout=TIMEOUT_S)
    return answers


def alone(offloaded: OffloadedModel, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        ids = torch.tensor([prompt], device=offloaded.model.device)
        out = offloaded.model.generate(ids, max_new_tokens=N_TOKENS, do_sample=False, pad_token_id=0)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def main(
    prompts: int = 1000,
    in_flight: int = 32,
    json: Path | None = None,
    seed: Annotated[int, typer.Option()] = 3,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Compare answers."""
    sys.path.insert(0, str(DEMO))
    import tasks

    texts = tasks.prompts(prompts, seed=seed)
    rows: list[Row] = []
    core = cores()[1]
    with expert_server(core, device=server_device) as first, expert_server(core, device=server_device) as second:
        for transport in ("shared", "stream"):
            with open_model(
                DEMO / "checkpoint", experts=[first, second], transport=transport, device=host_device, threads=1
            ) as offloaded:
                ids = [offloaded.tokenizer(text)["input_ids"] for text in texts]

                def accuracy(answers: list[list[int]], offloaded: OffloadedModel = offloaded) -> float:
                    spoken = [offloaded.tokenizer.decode(each, skip_special_tokens=True) for each in answers]
                    return 100 * sum(map(tasks.check, texts, spoken)) / len(texts)

                expected = [alone(offloaded, each) for each in ids]
                with ServingEngine(offloaded, ServeSettings(prefix_reuse=False)) as engine:
                    got = together(engine, ids, in_flight)
                same = 100 * sum(map(list.__eq__, got, expected)) / len(texts)
                rows.append(Row(transport, len(texts), in_flight, accuracy(expected), accuracy(got), same))
    table = Table(title="many requests at once against one at a time")
    for name in ("transport", "prompts", "in flight", "right alone", "right together", "same tokens"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.transport,
            f"{row.prompts:,}",
            str(row.in_flight),
            f"{row.accuracy_alone:.2f} %",
            f"{row.accuracy_together:.2f} %",
            f"{row.same_tokens_percent:.2f} %",
        )
    Console(width=120).print(table)
    if json is not None:
        settings = {"checkpoint": "examples/demo", "tokens": N_TOKENS, "seed": seed}
        settings |= {"host_device": host_device, "server_device": server_device}
        write_json(json, "concurrent_answers", settings, rows)


if __name__ == "__main__":
    typer.run(main)
