"""Task accuracy and greedy tokens of the demo checkpoint against a local run, one prompt at a time, in every cell.

``python bench/parity.py``: 64 held-out prompts, every mode x transport x payload dtype x number of servers. The limit
is the local run with transformers' ``grouped_mm``: the same accuracy, and every token equal.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import typer
from devices import CPU, HostDevice, ServerDevice
from prefill_ipc import DEMO
from rich.console import Console
from rich.table import Table
from servers import cores, expert_server, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer

from moeoffload import open_model

sys.path.insert(0, str(DEMO.parent))
import tasks

MODES, TRANSPORTS, DTYPES = ("batched", "stream", "auto"), ("shared", "stream"), ("f32", "f16", "bf16")
MAX_NEW_TOKENS = 12


@dataclass(frozen=True)
class Row:
    """One cell; both figures in percent."""

    servers: int
    mode: str
    transport: str
    dtype: str
    accuracy: float
    equal_tokens: float


def complete(model: Any, tokenizer: Any, prompts: list[str]) -> list[list[int]]:
    """Greedy completions, one prompt at a time."""
    completions = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        tokens = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        completions.append(tokens[0, inputs["input_ids"].shape[1] :].tolist())
    return completions


def accuracy(tokenizer: Any, prompts: list[str], completions: list[list[int]]) -> float:
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in completions]
    return 100 * sum(tasks.check(prompt, text) for prompt, text in zip(prompts, texts, strict=True)) / len(prompts)


def equal_tokens(expected: list[list[int]], got: list[list[int]]) -> float:
    pairs = [(a, b) for left, right in zip(expected, got, strict=True) for a, b in zip(left, right, strict=False)]
    longest = sum(max(len(left), len(right)) for left, right in zip(expected, got, strict=True))
    return 100 * sum(a == b for a, b in pairs) / longest


def main(
    prompts: int = 64,
    json: Path | None = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Run every cell; exit code 1 if one misses what the README promises."""
    torch.set_num_threads(1)
    console = Console()
    texts = tasks.prompts(prompts, seed=7)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    local = AutoModelForCausalLM.from_pretrained(DEMO, experts_implementation="grouped_mm").to(host_device).eval()
    expected = complete(local, tokenizer, texts)
    local_accuracy = accuracy(tokenizer, texts, expected)
    rows = []
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(expert_server(cores()[1], "--memory-gib", "1", device=server_device)) for _ in range(3)
        ]
        for n, mode, transport, dtype in product((1, 2, 3), MODES, TRANSPORTS, DTYPES):
            with open_model(
                str(DEMO), experts=servers[:n], mode=mode, transport=transport, dtype=dtype, device=host_device
            ) as offloaded:
                got = complete(offloaded.model, tokenizer, texts)
            rows.append(Row(n, mode, transport, dtype, accuracy(tokenizer, texts, got), equal_tokens(expected, got)))
    table = Table(title=f"{prompts} held-out prompts, bf16 model; local accuracy {local_accuracy:.1f} %")
    for column in ("servers", "mode", "transport", "payload", "accuracy %", "equal tokens %"):
        table.add_column(column)
    for row in rows:
        cells = (f"{row.accuracy:.1f}", f"{row.equal_tokens:.2f}")
        table.add_row(str(row.servers), row.mode, row.transport, row.dtype, *cells)
    console.print(table)
    if json is not None:
        on = {"host_device": host_device, "server_device": server_device}
        write_json(json, "parity", {"prompts": prompts, "local_accuracy": local_accuracy} | on, rows)
    exact = all(row.equal_tokens == 100 for row in rows if row.dtype != "f16")
    if not exact or any(abs(row.accuracy - local_accuracy) > 1 for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
