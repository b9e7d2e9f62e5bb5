"""Peak resident memory of host and expert servers while a real geometry is opened and used.

``python bench/memory.py --checkpoint DIR``: DIR is a checkpoint that bench/make_checkpoint.py wrote. The limit beside
each figure is what the process must hold (dense layers, or its experts) plus 600 MiB for Python, torch and workspaces.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from devices import CPU, HostDevice, ServerDevice
from rich.console import Console
from rich.table import Table
from servers import cores, expert_server_process, write_json

from moeoffload import open_model

MIB = 1 << 20
ALLOWANCE_MIB = 600


@dataclass(frozen=True)
class Row:
    """One process: what it must hold, the limit, its peak when the model is open and after a prompt, in MiB."""

    process: str
    holds_mib: float
    limit_mib: float
    open_mib: float
    prompt_mib: float


def peak_mib(pid: int) -> float:
    """Greatest resident memory of a process so far, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no VmHWM")


def host(checkpoint: str, addresses: str, prompt_tokens: int, device: str) -> None:
    """The host's part, in a process of its own; prints its figures and waits for a line between the two peaks."""
    with open_model(checkpoint, experts=addresses.split(","), device=device) as offloaded, torch.inference_mode():
        held = [server["resident_bytes"] / MIB for server in offloaded.report().servers]
        print(offloaded.checkpoint.dense_bytes / MIB, peak_mib(os.getpid()), *held, flush=True)
        sys.stdin.readline()
        offloaded.model(torch.randint(5, 1000, (1, prompt_tokens), device=device), logits_to_keep=1)
        print(peak_mib(os.getpid()), flush=True)
        sys.stdin.readline()


def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder written by bench/make_checkpoint.py")],
    servers: int = 2,
    prompt_tokens: int = 512,
    json: Path | None = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
    as_host: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure the peak of one host and of each server."""
    torch.set_num_threads(1)
    if as_host is not None:
        host(str(checkpoint), as_host, prompt_tokens, host_device)
        return
    console = Console()
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(expert_server_process(cores()[1], "--memory-gib", "8", device=server_device))
            for _ in range(servers)
        ]
        addresses = ",".join(address for _, address in running)
        command = [sys.executable, __file__, "--checkpoint", str(checkpoint), "--as-host", addresses]
        command += ["--prompt-tokens", str(prompt_tokens), "--host-device", host_device]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        dense, *figures = map(float, process.stdout.readline().split())
        host_open, held = figures[0], figures[1:]
        opened = [peak_mib(server.pid) for server, _ in running]
        print("go", file=process.stdin, flush=True)
        host_prompt = float(process.stdout.readline())
        prompted = [peak_mib(server.pid) for server, _ in running]
        print("go", file=process.stdin, flush=True)
        process.wait(60)
    rows.append(Row("host", dense, dense + ALLOWANCE_MIB, host_open, host_prompt))
    for number, (mib, at_open, at_prompt) in enumerate(zip(held, opened, prompted, strict=True)):
        rows.append(Row(f"server {number}", mib, mib + ALLOWANCE_MIB, at_open, at_prompt))
    table = Table(title=f"peak resident memory, MiB: {checkpoint.name}, {servers} servers")
    for column in ("process", "holds", "limit", "peak, model open", "", f"peak, after {prompt_tokens} tokens"):
        table.add_column(column, justify="left" if column in ("process", "") else "right")
    for row in rows:
        cells = [f"{mib:,.0f}" for mib in (row.holds_mib, row.limit_mib, row.open_mib)]
        verdict = "ok" if row.open_mib <= row.limit_mib else "over"
        table.add_row(row.process, *cells, verdict, f"{row.prompt_mib:,.0f}")
    console.print(table)
    if json is not None:
        settings = {"checkpoint": checkpoint.name, "servers": servers, "prompt": prompt_tokens}
        settings |= {"host_device": host_device, "server_device": server_device}
        write_json(json, "memory", settings, rows)
    if any(row.open_mib > row.limit_mib for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
