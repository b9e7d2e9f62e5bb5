"""What it costs that experts are remote: the remote model's time over that of the same model all in one process.

``python bench/overhead.py --checkpoint DIR --json out.json``: prefill of several prompt lengths, with the pipeline off
and on, and decode, over both transports. The baseline computes with the same kernels, and both take turns in one
process, so that a machine that becomes slower changes both; decoding takes many short turns. The limit of decode is the
bytes of weights and cache that a token needs over the bandwidth of one reading core; that of prefill its operations
over torch's best product on one core, or, with the pipeline on, on one core for the dense layers and one for the
experts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from devices import CPU, HostDevice, ServerDevice
from limits import Demand, matmul_flops, read_bandwidth
from local_experts import NAME
from local_model import benchmark_checkpoint, load_local
from phases import PARTS, watch, watch_local
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, expert_server, machine, write_json
from turns import Contender, Task, cache_bytes_per_token, decode, prefill, ratio, take_turns

from moeoffload import open_model
from moeoffload.kernels.fast_dense import accelerate_dense

DECODE_PROMPT = 64


@dataclass(frozen=True)
class Row:
    """One contender on one task; times in seconds of a prompt or of all decoded tokens.

    ``ratio`` is remote over local in one turn: median, least and greatest. ``parts`` are the seconds of one more,
    watched turn.
    """

    task: str
    tokens: int
    transport: str
    pipeline: str
    seconds: Spread
    limit_s: float
    ratio: Spread | None
    parts: dict[str, float]
    accounted: float | None


class Bench:
    """All measurements of one run; ``contenders`` begin with the local one."""

    def __init__(self, contenders: Sequence[Contender], repeats: int, console: Console, server_device: str) -> None:
        self.contenders = contenders
        self.repeats = repeats
        self.console = console
        offloaded = contenders[-1].offloaded
        assert offloaded is not None
        self.experts = [layer.module_name for layer in offloaded.checkpoint.layers]
        self.demand = Demand.of(contenders[0].model, offloaded.checkpoint)
        self.vocab = contenders[0].model.config.get_text_config().vocab_size
        dtype, host_device = offloaded.checkpoint.dtype, str(contenders[0].model.device)
        self.read_bytes_per_s, self.flop_per_s = read_bandwidth(host_device), matmul_flops(dtype, host_device)
        self.server_read_bytes_per_s, self.server_flop_per_s = self.read_bytes_per_s, self.flop_per_s
        if server_device != host_device:
            self.server_read_bytes_per_s = read_bandwidth(server_device)
            self.server_flop_per_s = matmul_flops(dtype, server_device)
        self.rows: list[Row] = []

    def prefill(self, n_tokens: int) -> None:
        """One prompt length, all contenders."""
        dense_flop, experts_flop = self.demand.prefill_flop(n_tokens)
        dense_s, experts_s = dense_flop / self.flop_per_s, experts_flop / self.server_flop_per_s
        limits = [max(dense_s, experts_s) if each.pipeline == "on" else dense_s + experts_s for each in self.contenders]
        limits[0] = (dense_flop + experts_flop) / self.flop_per_s
        task = functools.partial(prefill, prompt=self._prompt(n_tokens))
        self._measure("prefill", n_tokens, 1, self.repeats, self.contenders, task, limits)

    def decode(self, n_tokens: int, repeats: int) -> None:
        """Greedy tokens after a short prompt; the pipeline changes nothing about them."""
        serial = [contender for contender in self.contenders if contender.pipeline != "on"]
        cached = cache_bytes_per_token(self.contenders[0].model) * (DECODE_PROMPT + n_tokens // 2)
        local_s = self.demand.decode_bytes(cached) / self.read_bytes_per_s
        experts = self.demand.expert_bytes
        remote_s = local_s - experts / self.read_bytes_per_s + experts / self.server_read_bytes_per_s
        limits = [n_tokens * local_s, *[n_tokens * remote_s] * (len(serial) - 1)]
        task = functools.partial(decode, prompt=self._prompt(DECODE_PROMPT), n_tokens=n_tokens)
        self._measure("decode", n_tokens, n_tokens, repeats, serial, task, limits)

    def _prompt(self, n_tokens: int) -> torch.Tensor:
        return torch.randint(5, self.vocab, (1, n_tokens), generator=torch.manual_seed(n_tokens))

    def _measure(
        self,
        name: str,
        tokens: int,
        n_forwards: int,
        repeats: int,
        who: Sequence[Contender],
        task: Task,
        limits: Sequence[float],
    ) -> None:
        times = take_turns(who, task, repeats)
        for contender, mine, limit in zip(who, times, limits, strict=True):
            against = ratio(mine, times[0]) if contender.offloaded is not None else None
            accounted: float | None = None
            if contender.offloaded is None:
                parts = watch_local(contender, task, self.experts, n_forwards)
            else:
                parts, accounted = watch(contender, task, name)
            row = Row(
                name, tokens, contender.transport, contender.pipeline, Spread.of(mine), limit, against, parts, accounted
            )
            self.rows.append(row)
        self.console.print(f"  {name} of {tokens} tokens done", style="dim")


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder; default: one is written.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    quick: Annotated[bool, typer.Option(help="One short prompt, few repetitions.")] = False,
    lengths: Annotated[str, typer.Option(help="Prompt lengths, with commas.")] = "512,2048,4248",
    decode_tokens: int = 32,
    repeats: int = 5,
    decode_repeats: int = 21,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Measure prefill and decode, remote beside local."""
    if quick:
        repeats, decode_repeats, decode_tokens, lengths = 2, 2, 8, "512"
    host_core, server_core = cores()
    with contextlib.ExitStack() as stack:
        if checkpoint is None:
            checkpoint = benchmark_checkpoint(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model")
        address = stack.enter_context(expert_server(server_core, device=server_device))
        # Before torch's first product: threads that are made later inherit the core.
        os.sched_setaffinity(0, {host_core})
        torch.set_num_threads(1)
        console = Console(width=None if Console().is_terminal else 150)
        console.print(f"{machine()['cpu']}, host on core {host_core}, server on core {server_core}")
        contenders = [Contender(load_local(checkpoint, host_device))]
        for transport, pipeline in product(("shared", "stream"), ("off", "on")):
            offloaded = stack.enter_context(
                open_model(checkpoint, experts=[address], transport=transport, pipeline=pipeline, device=host_device)
            )
            # Both sides get the same dense layers; where they have them already this does nothing.
            if host_device == CPU:
                accelerate_dense(offloaded.model)
            contenders.append(Contender(offloaded.model, offloaded, transport, pipeline))
        bench = Bench(contenders, repeats, console, server_device)
        kernel = offloaded.links[0].info.kernel
        for length in lengths.split(","):
            bench.prefill(int(length))
        bench.decode(decode_tokens, decode_repeats)
    console.print(f"experts: {NAME} locally, {kernel} on the server")
    show(bench)
    if json is not None:
        settings = {
            "checkpoint": checkpoint.name,
            "quick": quick,
            "local_experts": NAME,
            "server_kernel": kernel,
            "repeats": repeats,
            "decode_repeats": decode_repeats,
            "decode_prompt": DECODE_PROMPT,
            "host_core": host_core,
            "server_core": server_core,
            "read_bytes_per_s": bench.read_bytes_per_s,
            "flop_per_s": bench.flop_per_s,
            "host_device": host_device,
            "server_device": server_device,
        }
        write_json(json, "overhead", settings, bench.rows)


def show(bench: Bench) -> None:
    """Prints both tables: the ratios, and where the time of the remote runs went."""
    rates = f"one core reads {bench.read_bytes_per_s / 1e9:.1f} GB/s, multiplies {bench.flop_per_s / 1e9:.0f} GFLOP/s"
    table = Table(title=f"medians of all turns (least-greatest); {rates}")
    for column in ("task", "tokens", "transport", "pipeline", "seconds", "tok/s", "limit tok/s", "remote / local"):
        table.add_column(column, justify="left" if column in ("task", "transport", "pipeline") else "right")
    parts = Table(title="one watched turn: seconds by part, and the share of the time that they account for")
    for column in ("task", "tokens", "transport", "pipeline", *PARTS, "accounted"):
        parts.add_column(column, justify="left" if column in ("task", "transport", "pipeline") else "right")
    for row in bench.rows:
        local = row.ratio is None
        what = (row.task, f"{row.tokens:,}", "local" if local else row.transport, row.pipeline)
        speeds = (f"{row.tokens / row.seconds.median:,.1f}", f"{row.tokens / row.limit_s:,.1f}")
        table.add_row(*what, f"{row.seconds:.3f}", *speeds, "-" if local else f"{row.ratio:.3f}")
        cells = [f"{row.parts.get(part, 0.0):.3f}" for part in PARTS]
        parts.add_row(*what, *cells, "-" if row.accounted is None else f"{row.accounted:.1%}")
    bench.console.print(table, parts)


if __name__ == "__main__":
    typer.run(main)
