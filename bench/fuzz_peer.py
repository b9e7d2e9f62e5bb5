"""An expert server to be fuzzed, a host that attaches to it properly, and bytes that are almost right."""

from __future__ import annotations

import contextlib
import os
import random
import re
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
import torch
from devices import CPU

from moeoffload.checkpoint import Checkpoint
from moeoffload.control.client import ControlClient
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.payload import PayloadDtype
from moeoffload.placement import ExpertTable
from moeoffload.transport import ChannelSizes
from moeoffload.wire import HEADER_BYTES, MAX_FRAME_BYTES, FrameHeader, FrameLayout, Kind

ROOT: Final = Path(__file__).parents[1]
DEMO: Final = ROOT / "examples" / "demo" / "checkpoint"
MIB: Final = 1 << 20
STEP_S: Final = 60.0
BATCH_CAPACITY: Final = 64
INTERESTING: Final = [0, 1, 2, 63, 64, 65, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1]
INTERESTING_64: Final = [*INTERESTING, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def mutated(data: bytes, rng: random.Random, most: int = 3) -> bytes:
    """``data`` with one to ``most`` changes: bits, bytes, numbers, cuts, repetitions."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, most)):
        kind, at = rng.randrange(7), rng.randrange(len(changed)) if changed else 0
        if not changed or kind == 0:
            changed[at:at] = rng.randbytes(rng.randint(1, 16))
        elif kind == 1:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            changed[at] = rng.randrange(256)
        elif kind == 3:
            width = rng.choice((1, 2, 4, 8))
            value = rng.choice(INTERESTING_64) & (2 ** (8 * width) - 1)
            changed[at : at + width] = value.to_bytes(width, "little")
        elif kind == 4:
            del changed[at : at + rng.randint(1, 16)]
        elif kind == 5:
            changed[at:at] = changed[at : at + rng.randint(1, 32)]
        else:
            del changed[rng.randrange(len(changed)) :]
    return bytes(changed)


def sealed(frame: bytes | bytearray) -> bytes:
    """The frame with the checksum that belongs to its header, if it has one."""
    if len(frame) < HEADER_BYTES:
        return bytes(frame)
    return bytes(frame[:60]) + struct.pack("<I", zlib.crc32(frame[:60])) + bytes(frame[HEADER_BYTES:])


@dataclass
class Watch:
    """Looks at the server's memory, descriptors and threads while it is fuzzed."""

    process: psutil.Process
    rss_mib: list[float] = field(default_factory=list)
    n_descriptors: list[int] = field(default_factory=list)
    n_threads: list[int] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        """One look."""
        with contextlib.suppress(psutil.Error):
            self.rss_mib.append(self.process.memory_info().rss / MIB)
            self.n_descriptors.append(self.process.num_fds())
            self.n_threads.append(self.process.num_threads())

    def run(self) -> None:
        """Looks until it is stopped."""
        while not self._stop.wait(0.25):
            self.look()

    def stop(self) -> None:
        """Ends `run`."""
        self._stop.set()

    def virtual(self, name: str) -> int:
        """Bytes of VmSize (now) or VmPeak (ever)."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(rf"{name}:\s+(\d+) kB", text)
        return int(match[1]) * 1024 if match else 0


@dataclass
class Server:
    """A running server and what was seen of it."""

    process: subprocess.Popen[str]
    address: str
    log: Path
    watch: Watch

    def alive(self) -> bool:
        """Whether the process that was started still runs."""
        return self.process.poll() is None

    def tracebacks(self) -> int:
        """Errors that nobody foresaw, from its log."""
        return self.log.read_text(errors="replace").count("Traceback (most recent call last)")

    def over_limit(self, before: int) -> int:
        """1 if the address space has ever been a whole largest frame above what it was before, else 0.

        An allocation that a lying length brings about counts there even if nobody touches it.
        """
        return int(self.watch.virtual("VmPeak") - before > MAX_FRAME_BYTES)


@contextlib.contextmanager
def server(folder: Path, model: Path = DEMO, device: str = CPU) -> Iterator[Server]:
    """A ``moeoffload-expert`` on loopback with its own copy of ``model``; its log goes to ``folder``."""
    command = [sys.executable, "-m", "moeoffload.cli.expert_app", "--listen", "127.0.0.1:0", "--exit-with-stdin"]
    command += ["--device", device, "--threads", "1", "--memory-gib", "0.5", "--model", str(model)]
    command += ["--batch-capacity", str(BATCH_CAPACITY)]
    # Else the address space would grow by 64 MiB for every thread that allocates, and hide what is looked for.
    environment = os.environ | {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}
    log = folder / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=ROOT
        )
    try:
        assert process.stdout is not None
        ready = re.search(r"ready on (\S+)", process.stdout.readline())
        if ready is None:
            raise SystemExit(f"the expert server did not start:\n{log.read_text()}")
        watch = Watch(psutil.Process(process.pid))
        looking = threading.Thread(target=watch.run, daemon=True)
        looking.start()
        yield Server(process, ready.group(1), log, watch)
        watch.stop()
        looking.join()
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


class Model:
    """The demo model as a host knows it."""

    def __init__(self, folder: Path = DEMO) -> None:
        self.checkpoint = Checkpoint.open(folder)
        self.dtype = PayloadDtype.from_torch(self.checkpoint.dtype)
        # Not all of them, so that there are slots beyond the table and layers without experts.
        self.table = ExpertTable(((0, 1, 2, 3, 4, 5, 6, 7),) * (len(self.checkpoint.layers) - 1) + ((),))

    def reference(self) -> pb.ModelReference:
        """The model in a request."""
        digest = self.checkpoint.digest
        return pb.ModelReference(reference="any", digest=digest, compute_dtype=self.dtype.label)

    def activate(self, transport: str) -> pb.Activate:
        """What a host wants."""
        checkpoint = self.checkpoint
        return pb.Activate(
            model_digest=checkpoint.digest,
            compute_dtype=self.dtype.label,
            table_digest=self.table.digest,
            hidden_size=checkpoint.hidden_size,
            top_k=checkpoint.top_k,
            dtype_out=self.dtype.label,
            dtype_back=self.dtype.label,
            batch_capacity=BATCH_CAPACITY,
            n_slots=4,
            transport=transport,
        )

    def layout(self, capacity: int) -> FrameLayout:
        """The frames of this model."""
        return FrameLayout(self.checkpoint.hidden_size, self.checkpoint.top_k, self.dtype, self.dtype, capacity)


class Attached:
    """A lease with loaded experts and one open offer. The caller opens and accepts the channel."""

    def __init__(self, address: str, model: Model, transport: str) -> None:
        self.client = ControlClient(address)
        try:
            self.client.connect(STEP_S)
            self.lease = self.client.attach(STEP_S)
            self.lease.load(model.reference(), model.table, progress=lambda loaded, total: None, timeout_s=STEP_S)
            offer = self.lease.activate(model.activate(transport))
        except BaseException:
            self.client.close()
            raise
        self.layout = model.layout(offer.batch_capacity)
        self.channel = offer.channels[0]
        self.sizes = ChannelSizes(self.channel.n_slots, self.channel.request_bytes, self.channel.reply_bytes)
        self.n_slots = self.sizes.n_slots
        self.epoch = 0

    def good_frame(self, request_id: int, rows: int = 1, layer: int = 0, slot: int = 0) -> bytearray:
        """A request that the server computes, if the slot is one."""
        layout = self.layout
        frame = bytearray(HEADER_BYTES + rows * layout.dispatch_row_bytes)
        views = layout.dispatch_views(memoryview(frame), rows)
        values = torch.arange(rows * layout.hidden, dtype=torch.float32).view(rows, layout.hidden)
        views.rows.copy_(values.sin())
        views.weights.fill_(0.25)
        views.slots.copy_(torch.arange(layout.top_k).add(slot).expand(rows, -1))
        FrameHeader(
            Kind.DISPATCH,
            layout.dtype_out,
            layout.dtype_back,
            request_id,
            self.epoch,
            layer,
            layout.top_k,
            rows,
            body_bytes=len(frame) - HEADER_BYTES,
        ).pack_into(memoryview(frame))
        return frame

    def frames(self) -> list[bytearray]:
        """What is mutated: good requests of several sizes, and some that are refused for different reasons."""
        found = [self.good_frame(0, rows) for rows in (1, 1, 2, 5, 20, self.layout.capacity)]
        found += [self.good_frame(0, 1, layer) for layer in (1, 2, 3, 4, 60_000)]
        found += [self.good_frame(0, 2, 0, slot) for slot in (4, 6, 100, -1, -2, -5)]
        return found

    def close(self) -> None:
        """Ends the lease and waits for it."""
        self.lease.close()
        self.client.close()


def wait_for(true: object, what: str, timeout_s: float = STEP_S) -> None:
    """Waits until ``true()``; SystemExit if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not true():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.02)
