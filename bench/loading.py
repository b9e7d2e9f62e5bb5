"""How fast servers load experts and hosts load dense layers, in every stored format, and how fast files are read.

``python bench/loading.py --folder DIR``: checkpoints of a real geometry are written to DIR where there are none yet,
which takes minutes. The limit is reading the same files from the page cache, a thread for each core, into memory that
stays, as weights do; reading into the same few buffers again and again is beside it. The best of several rounds counts,
in which they take turns, because memory that was free for seconds is slow at first on virtual machines.
The checkpoint in bfloat16 is also loaded with each ``--expert-format``; rates count bytes of the files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from devices import CPU, HostDevice, ServerDevice, settle
from rich.console import Console
from rich.table import Table
from servers import expert_server_process, write_json
from synthetic import Quantised, geometry_config, write_checkpoint

from moeoffload.checkpoint import Checkpoint
from moeoffload.control.client import ControlClient
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.formats.quantise import FORMATS
from moeoffload.host.packed_dense import load_with_packed_linears
from moeoffload.huge_pages import empty_weights
from moeoffload.placement import ExpertTable

PLAIN = "bf16"
BLOCK_BYTES = 8 << 20
LOAD_TIMEOUT_S = 300.0
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Row:
    """One format: its experts and dense layers in GB, and rates in GB/s."""

    format: str
    experts_gb: float
    dense_gb: float
    read_again: float
    read: float
    load: float
    load_of_read: float
    host: float


def read_rate(files: Sequence[Path], *, stays: bool) -> float:
    """GB/s of reading files that are in the page cache."""
    spans = [(file, start) for file in files for start in range(0, file.stat().st_size, BLOCK_BYTES)]
    opened = {file: os.open(file, os.O_RDONLY) for file in files}
    room = empty_weights((len(spans) if stays else CORES, BLOCK_BYTES), torch.uint8)

    def read(number: int) -> int:
        file, start = spans[number]
        buffer: Any = room[number if stays else number % CORES].numpy()
        return os.preadv(opened[file], [buffer], start)

    try:
        begun = time.perf_counter()
        with ThreadPoolExecutor(CORES) as pool:
            n_bytes = sum(pool.map(read, range(len(spans))))
        return n_bytes / (time.perf_counter() - begun) / 1e9
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def load_seconds(address: str, checkpoint: Checkpoint) -> float:
    """How long a server takes to load all experts, from its first progress to its last."""
    table = ExpertTable(tuple(tuple(range(layer.n_experts)) for layer in checkpoint.layers))
    dtype = checkpoint.dtype_label
    model = pb.ModelReference(
        reference=str(checkpoint.path),
        digest=checkpoint.digest,
        compute_dtype=dtype,
        expert_format=checkpoint.expert_format or "",
    )
    times: list[float] = []
    client = ControlClient(address)
    try:
        client.connect(LOAD_TIMEOUT_S)
        lease = client.attach(LOAD_TIMEOUT_S)
        lease.load(model, table, progress=lambda *_: times.append(time.perf_counter()), timeout_s=LOAD_TIMEOUT_S)
        lease.close()
    finally:
        client.close()
    return times[-1] - times[0]


def host_seconds(checkpoint: Checkpoint, device: str) -> float:
    """How long a host takes to load the dense layers."""
    begun = time.perf_counter()
    load_with_packed_linears(checkpoint, torch.device(device), "keep")
    settle(device)
    return time.perf_counter() - begun


def measure(name: str, path: Path, to: str | None, rounds: int, host_device: str, server_device: str) -> Row:
    """All figures of one checkpoint, a folder or a GGUF file, with its experts as stored or quantised ``to``."""

    plain, checkpoint = Checkpoint.open(path), Checkpoint.open(path, expert_format=to)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files) / 1e9
    experts = sum(layer.n_experts * layer.expert_bytes for layer in plain.layers) / 1e9
    words = ("--keep-warm", "off", "--memory-gib", "8")
    with expert_server_process(0, *words, device=server_device) as (server, address):
        for thread in Path(f"/proc/{server.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), os.sched_getaffinity(0))

        def turn() -> tuple[float, float, float]:
            again, stays = (read_rate(files, stays=stays) for stays in (False, True))
            return again, stays, experts / load_seconds(address, checkpoint)

        turn()
        again, stays, load = (max(rates) for rates in zip(*(turn() for _ in range(rounds)), strict=True))
    host = (total - experts) / min(host_seconds(checkpoint, host_device) for _ in range(rounds))
    return Row(name, experts, total - experts, again, stays, load, load / stays, host)


def checkpoints(folder: Path, names: Sequence[str], gb: float) -> Iterator[tuple[str, Path]]:
    """Checkpoints of all formats, written where they are missing; ``gb``: experts of each, about."""
    for name in names:
        bits = 16 if name == PLAIN else 4.5 if "4" in name or name in ("gptq", "awq") else 8.5
        layers = max(1, round(gb / (0.0755 * bits)))  # of 128 experts of 3 * 768 * 2048 weights
        if not (folder / name / "config.json").exists():
            form = None if name == PLAIN else name
            config = geometry_config("qwen3-30b-a3b", layers=layers, vocab=8192)
            write_checkpoint(config, folder / name, dtype=torch.bfloat16, form=form)
        yield name, folder / name


def main(
    folder: Annotated[Path, typer.Option(help="Where checkpoints are, or will be, a folder for each format.")],
    formats: Annotated[str, typer.Option(help="With commas between.")] = ",".join([PLAIN, *Quantised]),
    gb: Annotated[float, typer.Option(help="Experts of a checkpoint that is written.")] = 1.2,
    gguf: Annotated[list[Path] | None, typer.Option(help="A GGUF file, too; may be given several times.")] = None,
    rounds: int = 5,
    json: Path | None = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Measure loading in each format."""
    stored = [*checkpoints(folder, [name for name in formats.split(",") if name], gb)]
    stored += [(file.stem, file) for file in gguf or ()]
    cases: list[tuple[str, Path, str | None]] = [(name, path, None) for name, path in stored]
    cases += [(f"{PLAIN} to {to}", path, to) for name, path in stored if name == PLAIN for to in FORMATS]
    rows = [measure(*case, rounds, host_device, server_device) for case in cases]
    table = Table(title=f"loading, GB/s, {CORES} cores, best of {rounds}")
    columns = ("experts GB", "dense GB", "read again", "read (limit)", "server loads", "of limit", "host")
    for column in ("format", *columns):
        table.add_column(column, justify="left" if column == "format" else "right")
    for row in rows:
        sizes = (f"{row.experts_gb:.2f}", f"{row.dense_gb:.2f}", f"{row.read_again:.2f}", f"{row.read:.2f}")
        table.add_row(row.format, *sizes, f"{row.load:.2f}", f"{row.load_of_read:.2f}", f"{row.host:.2f}")
    Console().print(table)
    if json is not None:
        on = {"host_device": host_device, "server_device": server_device}
        write_json(json, "loading", {"gb": gb, "rounds": rounds} | on, rows)


if __name__ == "__main__":
    typer.run(main)
