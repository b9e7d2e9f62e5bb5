"""Two hosts on one server: what a decode step costs one of them while the other floods.

``python bench/fairness.py --checkpoint DIR``: DIR is a checkpoint that bench/make_checkpoint.py wrote. Host A sends one
dispatch of a decode step after the other, first alone, then while host B keeps all its slots full: with its largest
batches, or with batches that count as small. Server and hosts are processes of their own; frames go through the raw
channel. The server's memory is looked at before and after each flood.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated

import psutil
import torch
import typer
from devices import CPU, ServerDevice
from one_layer import OneLayer
from rich.console import Console
from rich.table import Table
from servers import cores, expert_server_process, write_json

from moeoffload.checkpoint import Checkpoint
from moeoffload.control.client import ControlClient, Lease
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.payload import PayloadDtype
from moeoffload.placement import ExpertTable
from moeoffload.transport import ChannelOffer, ChannelSizes, HostChannel, HostSlot, open_channel
from moeoffload.wire import HEADER_BYTES, FrameHeader, FrameLayout, Kind

TIMEOUT_S = 120.0
MIB = 1 << 20
BOUND = 3.0


@dataclass(frozen=True)
class Row:
    """One flood: A's dispatch times alone and beside it in ms, the ratio of the 95th percentiles, what B got."""

    transport: str
    flood_rows: int
    flood_slots: int
    alone_p50: float
    alone_p95: float
    alone_p99: float
    beside_p50: float
    beside_p95: float
    beside_p99: float
    ratio_p95: float
    flood_rows_per_s_alone: float
    flood_rows_per_s: float
    server_mib_before: float
    server_mib_after: float
    server_mib_most: float


class RawHost:
    """A lease with all experts of a checkpoint and its open channel; sends random rows."""

    def __init__(self, address: str, checkpoint: Path, transport: str, *, capacity: int, slots: int) -> None:
        about = Checkpoint.open(checkpoint)
        self.client = ControlClient(address)
        self.client.connect(TIMEOUT_S)
        self.lease: Lease = self.client.attach(TIMEOUT_S)
        dtype = about.dtype_label
        table = ExpertTable(tuple(tuple(range(layer.n_experts)) for layer in about.layers))
        model = pb.ModelReference(reference=str(checkpoint), digest=about.digest, compute_dtype=dtype)
        self.lease.load(model, table, progress=lambda loaded, total: None, timeout_s=TIMEOUT_S)
        offer = self.lease.activate(
            pb.Activate(
                model_digest=about.digest,
                compute_dtype=dtype,
                table_digest=table.digest,
                hidden_size=about.hidden_size,
                top_k=about.top_k,
                dtype_out=dtype,
                dtype_back=dtype,
                batch_capacity=capacity,
                n_slots=slots,
                transport=transport,
            )
        )
        payload = PayloadDtype.from_torch(about.dtype)
        self.layout = FrameLayout(about.hidden_size, about.top_k, payload, payload, offer.batch_capacity)
        (described,) = offer.channels
        sizes = ChannelSizes(described.n_slots, described.request_bytes, described.reply_bytes)
        parameters = dict(described.parameters)
        self.channel: HostChannel = open_channel(
            ChannelOffer(transport, sizes, parameters), host="127.0.0.1", timeout_s=TIMEOUT_S
        )
        self.epoch = self.lease.accept(transport, self.channel.nonce, "bench")
        self._n_experts = about.layers[0].n_experts

    def fill(self, slot: HostSlot, n_rows: int, seed: int) -> None:
        """Writes a dispatch of random rows and routes to layer 0, ready to be sent with `send`."""
        generator = torch.Generator().manual_seed(seed)
        views, layout = self.layout.dispatch_views(slot.request, n_rows), self.layout
        views.rows.copy_(torch.randn(n_rows, layout.hidden, generator=generator))
        views.weights.fill_(1 / layout.top_k)
        views.slots.copy_(torch.rand(n_rows, self._n_experts, generator=generator).argsort(dim=1)[:, : layout.top_k])

    def send(self, slot: HostSlot, n_rows: int) -> None:
        """Sends what the slot holds."""
        layout = self.layout
        header = FrameHeader(
            kind=Kind.DISPATCH,
            dtype_out=layout.dtype_out,
            dtype_back=layout.dtype_back,
            request_id=self.channel.next_id(slot),
            epoch=self.epoch,
            top_k=layout.top_k,
            rows=n_rows,
            body_bytes=n_rows * layout.dispatch_row_bytes,
        )
        header.pack_into(slot.request)
        self.channel.send(slot, HEADER_BYTES + header.body_bytes)

    def receive(self, slot: HostSlot) -> None:
        """Waits for the sums; a refusal ends the benchmark."""
        self.channel.wait(slot, TIMEOUT_S)
        header = FrameHeader()
        header.unpack_from(slot.reply)
        if header.kind != Kind.COMBINE:
            raise SystemExit(f"the server answered with an error, code {header.code}")

    def close(self) -> None:
        """Ends the lease."""
        self.channel.close()
        self.lease.close()
        self.client.close()


def flood(address: str, checkpoint: Path, transport: str, n_rows: int, n_slots: int) -> None:
    """Host B: from the first line on stdin on it keeps all its slots full; answers every further one with its rows."""
    torch.set_num_threads(1)
    host = RawHost(address, checkpoint, transport, capacity=n_rows, slots=n_slots)
    flying = deque(host.channel.acquire(TIMEOUT_S) for _ in host.channel.slots)
    for number, slot in enumerate(flying):
        host.fill(slot, n_rows, number)
    print("ready", flush=True)
    n_done = 0
    ended = threading.Event()

    def answer() -> None:
        for _ in sys.stdin:
            print(perf_counter(), n_done, flush=True)
        ended.set()

    sys.stdin.readline()
    threading.Thread(target=answer, daemon=True).start()
    for slot in flying:
        host.send(slot, n_rows)
    while not ended.is_set():
        host.receive(flying[0])
        n_done += n_rows
        host.send(flying[0], n_rows)
        flying.rotate(-1)
    host.close()


class Flooder:
    """The process of host B."""

    def __init__(self, address: str, checkpoint: Path, transport: str, n_rows: int, n_slots: int) -> None:
        command = [sys.executable, __file__, "--checkpoint", str(checkpoint), "--as-flood"]
        command += [f"{address},{transport},{n_rows},{n_slots}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def start(self) -> None:
        """Opens the gates."""
        self._say()

    def progress(self) -> tuple[float, int]:
        """A time in seconds and the rows done by then."""
        self._say()
        at, n_rows = self._read().split()
        return float(at), int(n_rows)

    def close(self) -> None:
        """Ends the flood and the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)

    def _say(self) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def dispatch_ms(host: RawHost, seconds: float) -> list[float]:
    """Times of decode-sized dispatches, one after the other with a pause as the host's own layers take."""
    times: list[float] = []
    until = perf_counter() + seconds
    while perf_counter() < until or len(times) < 20:
        slot = host.channel.acquire(TIMEOUT_S)
        host.fill(slot, 1, len(times))
        started = perf_counter()
        host.send(slot, 1)
        host.receive(slot)
        times.append((perf_counter() - started) * 1e3)
        host.channel.release(slot)
    return times


def percentiles(times: list[float]) -> tuple[float, float, float]:
    """The 50th, 95th and 99th."""
    cuts = statistics.quantiles(times, n=100)
    return cuts[49], cuts[94], cuts[98]


def measure(
    server: psutil.Process, address: str, checkpoint: Path, transport: str, n_rows: int, n_slots: int, seconds: float
) -> Row:
    """One kind of flood on one transport."""
    with contextlib.ExitStack() as stack:
        quiet = RawHost(address, checkpoint, transport, capacity=32, slots=4)
        stack.callback(quiet.close)
        dispatch_ms(quiet, 0.5)
        alone = percentiles(dispatch_ms(quiet, seconds))
        flooder = Flooder(address, checkpoint, transport, n_rows, n_slots)
        stack.callback(flooder.close)
        before = server.memory_info().rss
        flooder.start()
        time.sleep(seconds / 2)
        first = flooder.progress()
        time.sleep(seconds)
        second = flooder.progress()
        most = 0
        beside_ms: list[float] = []
        for _ in range(8):
            beside_ms += dispatch_ms(quiet, seconds / 4)
            most = max(most, server.memory_info().rss)
        third = flooder.progress()
        after = server.memory_info().rss
    beside = percentiles(beside_ms)
    return Row(
        transport,
        n_rows,
        n_slots,
        *alone,
        *beside,
        beside[1] / alone[1],
        (second[1] - first[1]) / (second[0] - first[0]),
        (third[1] - second[1]) / (third[0] - second[0]),
        before / MIB,
        after / MIB,
        most / MIB,
    )


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="Folder written by bench/make_checkpoint.py.")] = None,
    experts: Annotated[int, typer.Option(help="Experts of the layer that is written without a checkpoint.")] = 32,
    seconds: Annotated[float, typer.Option(help="Time of each phase.")] = 6.0,
    rows: Annotated[str, typer.Option(help="Rows of the batches that B floods with.")] = "1024,16,1",
    slots: Annotated[int, typer.Option(help="Requests that B has in flight.")] = 4,
    transports: Annotated[str, typer.Option(help="Transports to measure.")] = "shared,stream",
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    server_device: ServerDevice = CPU,
    as_flood: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measures every flood on every transport; exits with 1 when the bound or the server's budget is broken."""
    if as_flood is not None:
        assert checkpoint is not None
        where, over, *sizes = as_flood.split(",")
        flood(where, checkpoint, over, *map(int, sizes))
        return
    torch.set_num_threads(1)
    table = Table(title=f"decode dispatches of one host beside a flood of another one, ms; bound {BOUND:g} x alone")
    for column in ("transport", "flood", "alone p50 p95 p99", "beside p50 p95 p99", "p95 ratio", "flood rows/s", "MiB"):
        table.add_column(column, justify="left" if column in ("transport", "flood") else "right")
    measured: list[Row] = []
    with contextlib.ExitStack() as stack:
        model = OneLayer.open(stack, checkpoint, experts=experts, prompt_tokens=1)
        budget = model.experts_gib + 1.0
        for transport in transports.split(","):
            words = ("--memory-gib", f"{budget:.3f}", "--batch-capacity", "1024")
            with expert_server_process(cores()[1], *words, device=server_device) as (process, address):
                about = psutil.Process(process.pid)
                for n_rows in map(int, rows.split(",")):
                    measured.append(measure(about, address, model.path, transport, n_rows, slots, seconds))
    for row in measured:
        table.add_row(
            row.transport,
            f"{row.flood_slots} x {row.flood_rows} rows",
            f"{row.alone_p50:.2f} {row.alone_p95:.2f} {row.alone_p99:.2f}",
            f"{row.beside_p50:.2f} {row.beside_p95:.2f} {row.beside_p99:.2f}",
            f"{row.ratio_p95:.2f}",
            f"{row.flood_rows_per_s_alone:,.0f} -> {row.flood_rows_per_s:,.0f}",
            f"{row.server_mib_before:,.0f} -> {row.server_mib_after:,.0f} (most {row.server_mib_most:,.0f})",
        )
    Console(width=160).print(table)
    if json is not None:
        settings = {"checkpoint": model.path.name, "experts_gib": model.experts_gib, "budget_gib": budget}
        settings["server_device"] = server_device
        write_json(json, "fairness", {**settings, "seconds": seconds, "bound": BOUND}, measured)
    if any(row.ratio_p95 > BOUND or row.server_mib_most > budget * 1024 for row in measured):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
