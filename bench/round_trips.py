"""The transport benchmark: round trips of both transports between two pinned processes, beside what bounds them.

``python bench/round_trips.py --json out.json``: a frame goes from one process to the other, is copied there from
request to reply, and comes back, at 4 KiB to 16 MiB; a decode step of 4 KiB also goes all the way from a link to the
engine and back (`step_path`). Baselines of the same run: bare semaphores, once asleep and once spinning as shared
memory does, with that one copy; bare ZeroMQ, once as messages that are not copied and once in buffers that stay,
as tensors need it; gRPC unary. The limit of shared is the spinning semaphores, that of the stream bare ZeroMQ.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import grpc
import posix_ipc
import typer
import zmq
from rich.console import Console
from rich.table import Table
from servers import cores, write_json
from step_path import call_steps, serve_steps

from moeoffload.transport import (
    ChannelSizes,
    HostChannel,
    ServerChannel,
    ServerSlot,
    SharedServerEnd,
    StreamKeys,
    StreamListener,
    open_channel,
)
from moeoffload.transport.spin import AdaptiveSpin
from moeoffload.wire import HEADER_BYTES, FrameHeader

KIB, MIB = 1 << 10, 1 << 20
BYTES = (4 * KIB, 64 * KIB, MIB, 2 * MIB, 4 * MIB, 16 * MIB)
SIZES = ChannelSizes(n_slots=2, request_bytes=BYTES[-1], reply_bytes=BYTES[-1])
TIMEOUT_S = 30.0
STEPS = "shared, decode step"
STREAM_STEPS = "stream, decode step"
GRPC_METHOD = "/bench.Echo/Call"
GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]

Call = Callable[[int], None]
"""One round trip of so many bytes."""

LOOKING_BYTES = 4 * KIB + 2 * BYTES[-1]


class Looking:
    """One side's view of memory with two bells, and its way to wait for a semaphore."""

    def __init__(self, memory: posix_ipc.SharedMemory) -> None:
        view = memoryview(mmap.mmap(memory.fd, LOOKING_BYTES))
        memory.close_fd()
        self.words = view[: 4 * KIB].cast("Q")
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self.bells = (address, address + 64)
        self.there, self.back = view[4 * KIB : 4 * KIB + BYTES[-1]], view[4 * KIB + BYTES[-1] :]
        self.spin = AdaptiveSpin()


@dataclass(frozen=True)
class Row:
    """One contender at one size; times in microseconds."""

    contender: str
    n_bytes: int
    median_us: float
    p95_us: float
    limit: str
    limit_us: float | None


# -- the serving process: one function per contender; says its address, then serves until the pipe is closed


def echo(channel: ServerChannel, slot: ServerSlot) -> None:
    slot.reply[: slot.n_bytes] = slot.request[: slot.n_bytes]
    channel.reply(slot, slot.n_bytes)


def serve_shared(pipe: Connection) -> None:
    server = SharedServerEnd(SIZES, echo)
    serve_until_closed(pipe, server.offer)
    server.close()


def serve_stream(pipe: Connection) -> None:
    listener = StreamListener()
    serve_until_closed(pipe, listener.open_channel(SIZES, echo).offer)
    listener.close()


def serve_stream_curve(pipe: Connection) -> None:
    listener = StreamListener(encrypted=True)
    keys = StreamKeys.new()
    serve_until_closed(pipe, (listener.open_channel(SIZES, echo, keys.public).offer, keys))
    listener.close()


def serve_semaphore(pipe: Connection) -> None:
    names = (f"/moeoffload-bench-{os.getpid()}-a", f"/moeoffload-bench-{os.getpid()}-b")
    there, back = (posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600) for name in names)
    pipe.send(names)
    while not pipe.poll():
        with contextlib.suppress(posix_ipc.BusyError):
            while True:
                there.acquire(0.2)
                back.release()


def serve_looking(pipe: Connection) -> None:
    """As `serve_semaphore`, but looks before it sleeps, and copies the frame as an echo over shared memory has to."""
    pair = [posix_ipc.Semaphore(f"/moeoffload-bench-{os.getpid()}-{i}", posix_ipc.O_CREX, mode=0o600) for i in "ab"]
    memory = posix_ipc.SharedMemory(
        f"/moeoffload-bench-{os.getpid()}", posix_ipc.O_CREX, size=LOOKING_BYTES, mode=0o600
    )
    looking = Looking(memory)
    pipe.send((*(semaphore.name for semaphore in pair), memory.name))
    there, back = pair
    number = 0
    while not pipe.poll():
        while looking.spin.acquire(there, looking.bells[0], number + 1, 0.2):
            number += 1
            n_bytes = looking.words[2]
            looking.back[:n_bytes] = looking.there[:n_bytes]
            back.release()
            looking.words[8] = number


def serve_zeromq(pipe: Connection) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
        while True:
            identity, frame = router.recv_multipart(copy=False)
            if len(frame) == 0:
                return
            router.send_multipart([identity, frame], copy=False)


def send_part(socket: zmq.Socket[bytes], part: memoryview) -> None:
    """Sends from where it lies what is too much to copy."""
    if len(part) < 256 * KIB:
        socket.send(part)
    else:
        socket.send(part, copy=False)


def serve_zeromq_buffers(pipe: Connection) -> None:
    """As `serve_zeromq`, but what arrives is received into a buffer, copied as an echo is, and sent from another."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
        request, reply = memoryview(bytearray(BYTES[-1])), memoryview(bytearray(BYTES[-1]))
        while True:
            identity = router.recv()
            n_bytes = router.recv_into(request)
            if n_bytes == 0:
                return
            reply[:n_bytes] = request[:n_bytes]
            router.send(identity, zmq.SNDMORE)
            send_part(router, reply[:n_bytes])


def serve_grpc(pipe: Connection) -> None:
    from concurrent.futures import ThreadPoolExecutor

    class Echo(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: request)

    server = grpc.server(ThreadPoolExecutor(1), options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    serve_until_closed(pipe, port)
    server.stop(0).wait()


def serve_until_closed(pipe: Connection, address: Any) -> None:
    pipe.send(address)
    with contextlib.suppress(EOFError):
        pipe.recv()


# -- the calling process


@contextlib.contextmanager
def call_channel(offer: Any, keys: StreamKeys | None = None) -> Iterator[Call]:
    host: HostChannel = open_channel(offer, host="127.0.0.1", timeout_s=TIMEOUT_S, keys=keys)
    header = FrameHeader()

    def call(n_bytes: int) -> None:
        slot = host.acquire(TIMEOUT_S)
        header.request_id, header.body_bytes = host.next_id(slot), n_bytes - HEADER_BYTES
        header.pack_into(slot.request)
        host.send(slot, n_bytes)
        host.wait(slot, TIMEOUT_S)
        host.release(slot)

    yield call
    host.close()


@contextlib.contextmanager
def call_semaphore(names: Any) -> Iterator[Call]:
    there, back = (posix_ipc.Semaphore(name) for name in names)
    for semaphore in (there, back):
        semaphore.unlink()

    def call(n_bytes: int) -> None:
        there.release()
        back.acquire(TIMEOUT_S)

    yield call


@contextlib.contextmanager
def call_looking(names: Any) -> Iterator[Call]:
    there, back = (posix_ipc.Semaphore(name) for name in names[:2])
    memory = posix_ipc.SharedMemory(names[2])
    looking = Looking(memory)
    for named in (there, back, memory):
        named.unlink()
    number = 0

    def call(n_bytes: int) -> None:
        nonlocal number
        number += 1
        looking.words[2] = n_bytes
        there.release()
        looking.words[0] = number
        looking.spin.acquire(back, looking.bells[1], number, TIMEOUT_S)

    yield call


@contextlib.contextmanager
def call_zeromq_buffers(port: Any) -> Iterator[Call]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{port}")
        request, reply = memoryview(bytearray(BYTES[-1])), memoryview(bytearray(BYTES[-1]))

        def call(n_bytes: int) -> None:
            send_part(dealer, request[:n_bytes])
            dealer.recv_into(reply)

        yield call
        dealer.send(b"")
        dealer.close(1000)


@contextlib.contextmanager
def call_zeromq(port: Any) -> Iterator[Call]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{port}")
        frames = {n_bytes: bytes(n_bytes) for n_bytes in BYTES}

        def call(n_bytes: int) -> None:
            if n_bytes < 256 * KIB:
                dealer.send(frames[n_bytes])
            else:
                dealer.send(frames[n_bytes], copy=False)
            dealer.recv(copy=False)

        yield call
        dealer.send(b"")
        dealer.close(1000)


@contextlib.contextmanager
def call_grpc(port: Any) -> Iterator[Call]:
    frames = {n_bytes: bytes(n_bytes) for n_bytes in BYTES}
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=GRPC_OPTIONS) as channel:
        echo_once = channel.unary_unary(GRPC_METHOD, request_serializer=None, response_deserializer=None)
        yield lambda n_bytes: echo_once(frames[n_bytes], timeout=TIMEOUT_S)


@contextlib.contextmanager
def call_memcpy(_: Any) -> Iterator[Call]:
    source, target = memoryview(bytearray(BYTES[-1])), memoryview(bytearray(BYTES[-1]))

    def call(n_bytes: int) -> None:
        target[:n_bytes] = source[:n_bytes]

    yield call


CONTENDERS: dict[str, tuple[Callable[[Connection], None] | None, Callable[[Any], Any]]] = {
    "memcpy": (None, call_memcpy),
    "semaphore": (serve_semaphore, call_semaphore),
    "semaphore, looking": (serve_looking, call_looking),
    "shared": (serve_shared, call_channel),
    STEPS: (serve_steps, call_steps),
    "ZeroMQ tcp": (serve_zeromq, call_zeromq),
    "ZeroMQ tcp, buffers": (serve_zeromq_buffers, call_zeromq_buffers),
    "stream": (serve_stream, call_channel),
    STREAM_STEPS: (functools.partial(serve_steps, over_stream=True), call_steps),
    "stream, CURVE": (serve_stream_curve, lambda offer_and_keys: call_channel(*offer_and_keys)),
    "gRPC unary": (serve_grpc, call_grpc),
}


def in_server_process(serve: Callable[[Connection], None], pipe: Connection, core: int) -> None:
    os.sched_setaffinity(0, {core})
    serve(pipe)


@contextlib.contextmanager
def served(serve: Callable[[Connection], None] | None, core: int) -> Iterator[Any]:
    """Runs ``serve`` in a process of its own, pinned to ``core``; yields its address."""
    if serve is None:
        yield None
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moeoffload.transport", "grpc"])
    ours, theirs = context.Pipe()
    process = context.Process(target=in_server_process, args=(serve, theirs, core), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join(5)
        process.kill()


def measure(call: Call, n_bytes: int, budget_s: float) -> tuple[float, float]:
    """Median and 95th percentile of a call in microseconds, of as many calls as fit into ``budget_s``, at least 20."""
    for _ in range(5):
        call(n_bytes)
    times: list[float] = []
    end = perf_counter() + budget_s
    while len(times) < 20 or (perf_counter() < end and len(times) < 5000):
        started = perf_counter()
        call(n_bytes)
        times.append((perf_counter() - started) * 1e6)
    return statistics.median(times), sorted(times)[int(len(times) * 0.95)]


def limit_of(contender: str, n_bytes: int, medians: dict[tuple[str, int], float]) -> tuple[str, float | None]:
    """What bounds this figure, and its time in this run."""
    if contender in ("shared", STEPS):
        return "semaphore, looking", medians["semaphore, looking", n_bytes]
    if contender in ("stream", STREAM_STEPS):
        return "ZeroMQ tcp", medians["ZeroMQ tcp", n_bytes]
    return "", None


def main(
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    quick: Annotated[bool, typer.Option(help="A tenth of the time per figure.")] = False,
) -> None:
    """Measures every contender at every size and prints the table."""
    host_core, server_core = cores()
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {host_core})
    rows: list[Row] = []
    medians: dict[tuple[str, int], float] = {}
    for name, (serve, connect) in CONTENDERS.items():
        with served(serve, server_core) as address, connect(address) as call:
            for n_bytes in BYTES[:1] if "step" in name else BYTES:
                medians[name, n_bytes], p95 = measure(call, n_bytes, 0.1 if quick else 1.0)
                limit = limit_of(name, n_bytes, medians)
                rows.append(Row(name, n_bytes, medians[name, n_bytes], p95, *limit))
    os.sched_setaffinity(0, usable)

    table = Table(title=f"round trip between cores {host_core} and {server_core}, median in microseconds")
    table.add_column("")
    for n_bytes in BYTES:
        table.add_column(f"{n_bytes // MIB} MiB" if n_bytes >= MIB else f"{n_bytes // KIB} KiB", justify="right")
    for name in CONTENDERS:
        mine = [row for row in rows if row.contender == name]
        table.add_row(name, *(f"{row.median_us:,.1f}" for row in mine))
        table.add_row("  95th percentile", *(f"{row.p95_us:,.1f}" for row in mine), style="dim")
        if mine[0].limit_us is not None:
            limits = " / ".join(dict.fromkeys(row.limit for row in mine))
            table.add_row(f"  limit: {limits}", *(f"{row.limit_us:,.1f}" for row in mine), style="dim")
    Console().print(table)
    if json is not None:
        write_json(json, "round_trips", {"quick": quick, "cores": [host_core, server_core]}, rows)


if __name__ == "__main__":
    typer.run(main)
