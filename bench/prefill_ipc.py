"""The prefill IPC benchmark: what crosses between host and expert server, and what it costs, by mode and transport.

``python bench/prefill_ipc.py [MODEL] --json out.json``: a prompt of 4248 tokens and a completion of 128, for every
mode x transport x payload dtype. The baseline is the same model all in one process with the same kernel; the limit is
the time that one core needs to copy the payload once.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from devices import CPU, HostDevice, ServerDevice, settle
from local_model import load_local
from rich.console import Console
from rich.table import Table
from servers import Spread, copy_bandwidth, cores, expert_server, machine, write_json

from moeoffload import OffloadedModel, open_model

DEMO = Path(__file__).parents[1] / "examples" / "demo" / "checkpoint"
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One cell. Calls and bytes are those of one prefill; times in seconds."""

    mode: str
    transport: str
    dtype: str
    calls: int
    bytes_out: int
    bytes_back: int
    prefill_s: Spread
    decode_tokens_per_s: Spread
    copy_limit_s: float
    prefill_vs_stream_percent: float | None


def timed_generate(model: Any, prompt: torch.Tensor, completion: int) -> tuple[float, float]:
    """Prefill seconds and decode tokens per second of one generation of exactly ``completion`` tokens."""
    marks: list[float] = []

    def mark(*_: Any) -> None:
        settle(model.device)
        marks.append(perf_counter())

    hook = model.register_forward_hook(mark)
    started = perf_counter()
    model.generate(prompt, max_new_tokens=completion, min_new_tokens=completion, do_sample=False, pad_token_id=0)
    hook.remove()
    return marks[0] - started, (len(marks) - 1) / (marks[-1] - marks[0])


def repeat(model: Any, prompt: torch.Tensor, completion: int, repeats: int) -> tuple[Spread, Spread]:
    timed_generate(model, prompt, 2)
    runs = [timed_generate(model, prompt, completion) for _ in range(repeats)]
    return Spread.of([prefill for prefill, _ in runs]), Spread.of([decode for _, decode in runs])


def repeat_and_count(
    offloaded: OffloadedModel, prompt: torch.Tensor, completion: int, repeats: int
) -> tuple[Spread, Spread, tuple[int, int, int]]:
    """As `repeat`, and the calls, bytes out and bytes back of one of the prefills that were timed."""
    timed_generate(offloaded.model, prompt, 2)
    runs = []
    for _ in range(repeats):
        offloaded.recorder.reset()
        runs.append(timed_generate(offloaded.model, prompt, completion))
    phase = offloaded.report().phases["prefill"]
    counts = phase["calls"], phase["bytes_out"], phase["bytes_back"]
    return Spread.of([prefill for prefill, _ in runs]), Spread.of([decode for _, decode in runs]), counts


def main(
    model: Annotated[str, typer.Argument(help="Checkpoint folder")] = str(DEMO),
    prompt_tokens: int = 4248,
    completion: int = 128,
    modes: str = "stream,batched,auto",
    transports: str = "shared,stream",
    dtypes: str = "f32,f16,bf16",
    repeats: int = 3,
    batch_capacity: int = 1024,
    hot_slice: int = 4,
    json: Path | None = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Measure every cell of modes x transports x dtypes."""
    host_core, server_core = cores()
    import os

    os.sched_setaffinity(0, {host_core})
    torch.set_num_threads(1)
    console = Console(width=None if Console().is_terminal else 150)
    about = machine()
    console.print(f"{about['cpu']}, host on core {host_core}, server on core {server_core}, torch {about['torch']}")
    bandwidth = copy_bandwidth()

    local = load_local(Path(model), host_device)
    prompt = torch.randint(
        5, local.config.get_text_config().vocab_size, (1, prompt_tokens), generator=torch.manual_seed(0)
    ).to(host_device)
    local_prefill, local_decode = repeat(local, prompt, completion, repeats)
    del local
    gc.collect()

    rows: list[Row] = []
    with expert_server(server_core, "--batch-capacity", "4096", device=server_device) as address:
        for transport, dtype, mode in product(transports.split(","), dtypes.split(","), modes.split(",")):
            with open_model(
                model,
                experts=[address],
                mode=mode,
                transport=transport,
                dtype=dtype,
                batch_capacity=batch_capacity,
                hot_slice=hot_slice,
                device=host_device,
            ) as offloaded:
                prefill, decode, (calls, out, back) = repeat_and_count(offloaded, prompt, completion, repeats)
            reference = [row for row in rows if (row.mode, row.transport, row.dtype) == ("stream", transport, dtype)]
            change = 100 * (prefill.median / reference[0].prefill_s.median - 1) if reference else None
            limit = (out + back) / bandwidth
            rows.append(Row(mode, transport, dtype, calls, out, back, prefill, decode, limit, change))
            console.print(f"  {transport} {dtype} {mode}: prefill {prefill:.2f} s, decode {decode:.1f} tok/s")

    table = Table(title=f"prompt {prompt_tokens}, completion {completion}, medians of {repeats} (least-greatest)")
    for column in ("mode", "transport", "dtype"):
        table.add_column(column)
    for column in ("calls", "MiB out", "MiB back", "prefill s", "copy limit s", "decode tok/s", "prefill vs stream"):
        table.add_column(column, justify="right")
    table.add_row("local", "-", "-", "0", "0", "0", f"{local_prefill:.2f}", "-", f"{local_decode:.1f}", "-")
    for row in rows:
        table.add_row(
            row.mode,
            row.transport,
            row.dtype,
            f"{row.calls:,}",
            f"{row.bytes_out / MIB:.2f}",
            f"{row.bytes_back / MIB:.2f}",
            f"{row.prefill_s:.2f}",
            f"{row.copy_limit_s:.4f}",
            f"{row.decode_tokens_per_s:.1f}",
            "-" if row.prefill_vs_stream_percent is None else f"{row.prefill_vs_stream_percent:+.1f} %",
        )
    console.print(table)
    if json is not None:
        settings = {
            "model": Path(model).name,
            "prompt_tokens": prompt_tokens,
            "completion": completion,
            "repeats": repeats,
            "batch_capacity": batch_capacity,
            "hot_slice": hot_slice,
            "copy_bytes_per_s": bandwidth,
            "host_device": host_device,
            "server_device": server_device,
        }
        local_row = Row("local", "-", "-", 0, 0, 0, local_prefill, local_decode, 0.0, None)
        write_json(json, "prefill_ipc", settings, [local_row, *rows])


if __name__ == "__main__":
    typer.run(main)
