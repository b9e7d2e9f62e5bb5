"""Two servers, one slowed down: is each busy for the same time, and does the slow one help rather than harm?

``python bench/balance.py [--checkpoint DIR] [--factor 4]``. The limit is perfect balance: every server busy for the
mean, and never slower than without the slow one. So that two cores are enough, the slow server has the host's core,
which idles while the host waits; most of its own time the slow one sleeps. Routing of a random model is far from even;
with the statistics of `moeoffload profile` placement knows that.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from devices import CPU, HostDevice, ServerDevice, settle
from one_layer import OneLayer
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, expert_server, machine, write_json
from transformers import DynamicCache

from moeoffload import open_model
from moeoffload.host.routing import RoutingCounter


@dataclass(frozen=True)
class Row:
    """One set of servers; busy is the greatest busy time of a server over the mean."""

    servers: str
    prefill_s: Spread
    decode_tokens_per_s: Spread
    experts: list[int]
    busy_s: list[float]
    busiest_to_mean: float


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder; default: one layer is written")] = None,
    factor: float = 4.0,
    prompt_tokens: int = 512,
    completion: int = 64,
    repeats: int = 5,
    json: Path | None = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Measure the fast server alone, and with one that takes ``factor`` times as long."""
    host_core, server_core = cores()
    os.sched_setaffinity(0, {host_core})
    torch.set_num_threads(1)
    console = Console()
    console.print(f"{machine()['cpu']}, host and slow server on core {host_core}, fast server on core {server_core}")
    with contextlib.ExitStack() as stack:
        model = OneLayer.open(stack, checkpoint, experts=64, prompt_tokens=prompt_tokens)
        memory = ("--memory-gib", f"{3 * model.experts_gib + 1:.3f}")
        fast = stack.enter_context(expert_server(server_core, *memory, device=server_device))
        slow = stack.enter_context(expert_server(host_core, *memory, device=server_device, slow=(f"factor={factor}",)))
        stats = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "routing.json"
        write_routing_stats(model, fast, stats, host_device)
        both = f"fast + {factor:g} x slower"
        sets: dict[str, tuple[list[str], Path | None]] = {"fast alone": ([fast], None)}
        sets |= {both: ([fast, slow], None), f"{both}, routing known": ([fast, slow], stats)}
        opened = {
            name: stack.enter_context(
                open_model(model.path, experts=addresses, routing_stats=routing, pipeline="off", device=host_device)
            )
            for name, (addresses, routing) in sets.items()
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sets}
        for repeat in range(repeats + 1):
            for name, offloaded in opened.items():
                if repeat == 1:
                    offloaded.recorder.reset()
                timing = timed_run(offloaded.model, model.prompt, completion)
                if repeat:
                    times[name].append(timing)
        rows = [row(name, times[name], opened[name].report().servers) for name in sets]
    table = Table(title=f"prompt {prompt_tokens}, completion {completion}, medians of {repeats} (least-greatest)")
    for column in ("servers", "experts", "prefill s", "decode tok/s", "busy s", "busiest / mean"):
        table.add_column(column, justify="left" if column == "servers" else "right")
    for each in rows:
        table.add_row(
            each.servers,
            " + ".join(map(str, each.experts)),
            f"{each.prefill_s:.3f}",
            f"{each.decode_tokens_per_s:.1f}",
            " + ".join(f"{seconds:.2f}" for seconds in each.busy_s),
            f"{each.busiest_to_mean:.2f}",
        )
    console.print(table)
    if json is not None:
        on = {"host_device": host_device, "server_device": server_device}
        write_json(json, "balance", {"factor": factor, "prompt": prompt_tokens, "completion": completion} | on, rows)


def timed_run(model: Any, prompt: torch.Tensor, completion: int) -> tuple[float, float]:
    """Prefill seconds, and tokens per second of decoding random tokens.

    Greedy tokens of a random model soon repeat themselves, and with them a few routes.
    """
    tokens = torch.randint(5, model.config.vocab_size, (completion,), generator=torch.manual_seed(completion))
    tokens, prompt = tokens.to(model.device), prompt.to(model.device)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        started = perf_counter()
        model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        settle(model.device)
        prefilled = perf_counter()
        for token in tokens:
            model(token.view(1, 1), past_key_values=cache, use_cache=True, logits_to_keep=1)
        settle(model.device)
        return prefilled - started, completion / (perf_counter() - prefilled)


def write_routing_stats(model: OneLayer, address: str, path: Path, host_device: str) -> None:
    """What `moeoffload profile` writes, of other prompts than the measured one."""
    with open_model(model.path, experts=[address], pipeline="off", device=host_device) as offloaded:
        counter = RoutingCounter(offloaded.checkpoint)
        offloaded.dispatcher.on_routes = counter.count
        vocab = offloaded.checkpoint.config.get_text_config().vocab_size
        for seed in range(8):
            timed_run(offloaded.model, torch.randint(5, vocab, (1, 64), generator=torch.manual_seed(seed)), 64)
        counter.write(path)


def row(name: str, times: list[tuple[float, float]], servers: list[dict[str, Any]]) -> Row:
    busy = [sum(phase["compute_s"] for phase in server["phases"].values()) for server in servers]
    return Row(
        name,
        Spread.of([prefill for prefill, _ in times]),
        Spread.of([decode for _, decode in times]),
        [server["n_experts"] for server in servers],
        busy,
        max(busy) * len(busy) / sum(busy),
    )


if __name__ == "__main__":
    typer.run(main)
