"""Fuzzes a real expert server over real sockets, and every parser guided by coverage; the server must stay as it was.

    python bench/fuzz.py --seconds 600 --json bench/results/fuzz.json

A million frames over both transports, a hundred thousand mutated calls, connections that say anything, and the targets
of ``fuzz/``. Exit code 1 if the server crashed, hung, did not foresee something, grew by a whole largest frame, kept
what belonged to hosts that are gone, or answers a good request otherwise than before.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from devices import CPU
from fuzz_calls import fuzz_calls
from fuzz_frames import (
    HTTP2_CALL,
    HTTP2_PREFACE,
    HTTP2_SETTINGS,
    ZMTP_GREETING,
    ZMTP_READY,
    Counts,
    SharedFuzz,
    StreamFuzz,
    fuzz_connections,
)
from fuzz_peer import ROOT, STEP_S, Model, Server, server, wait_for
from servers import write_json

from moeoffload.control.client import ControlClient

TARGETS: Final = ("requests", "replies", "control", "files", "settings")
FRAMES: Final = 1_000_000
CALLS: Final = 100_000
WHOLE_S: Final = 600.0
"""Runs of at least so many seconds go on until they have those numbers; shorter ones end in time."""
TARGET_MIB: Final = 1536


@dataclass
class Row:
    """One part of a run: inputs, what came of them, and the server after it."""

    part: str
    inputs: int
    seconds: float
    good: int
    refused: int
    dropped: int
    crashes: int
    hangs: int
    over_limit: int
    server_mib: float | None
    descriptors: int | None
    threads: int | None


@dataclass
class Run:
    """Everything of one run: ``verdicts`` are 0 or True where all is well."""

    rows: list[Row]
    skipped: list[str]
    verdicts: dict[str, int | bool | float]

    @property
    def failed(self) -> bool:
        """Whether anything happened that must not."""
        bad = any(row.crashes or row.hangs or row.over_limit for row in self.rows)
        left = any(self.verdicts.get(name, 0) for name in ("tracebacks", "leases_left", "experts_left"))
        return bad or left or not self.verdicts.get("good_request_right", True)


def fuzz_server(
    seconds: float,
    seed: int,
    least: tuple[int, int],
    folder: Path,
    say: Callable[[Row], None],
    device: str = CPU,
) -> Run:
    """The parts that need a server, in ``seconds`` altogether; ``least`` frames and calls if that takes longer."""
    rows: list[Row] = []
    model, rng = Model(), random.Random(seed)
    with server(folder, device=device) as running:
        good = _good_answer(running, model)
        before, watch = running.watch.virtual("VmPeak"), running.watch
        watch.look()
        start_mib, start_descriptors = watch.rss_mib[-1], watch.n_descriptors[-1]

        def part(name: str, share: float, work: Callable[[float], Counts]) -> None:
            started = time.monotonic()
            counts = work(seconds * share)
            took = time.monotonic() - started
            counts.crashes += not running.alive()
            watch.look()
            now = (round(watch.rss_mib[-1], 1), watch.n_descriptors[-1], watch.n_threads[-1])
            rows.append(Row(name, seconds=round(took, 1), over_limit=running.over_limit(before),
                            server_mib=now[0], descriptors=now[1], threads=now[2], **asdict(counts)))  # fmt: skip
            say(rows[-1])

        def frames(kind: type[SharedFuzz | StreamFuzz]) -> Callable[[float], Counts]:
            def work(part_s: float) -> Counts:
                counts, peer = Counts(), kind(running, model)
                try:
                    peer.run(part_s, least[0] // 2, rng, counts)
                finally:
                    peer.close()
                gc.collect()
                return counts

            return work

        control_port = int(running.address.rpartition(":")[2])
        stream = StreamFuzz(running, model)
        stream_port = stream.port
        stream.close()
        greetings = {
            control_port: [HTTP2_PREFACE, HTTP2_SETTINGS, HTTP2_CALL],
            stream_port: [ZMTP_GREETING, ZMTP_READY],
        }
        part("frames, shared", 0.3, frames(SharedFuzz))
        part("frames, stream", 0.3, frames(StreamFuzz))
        part("calls", 0.3, lambda part_s: fuzz_calls(running, model, part_s, least[1], seed))
        for name, port in (("connections, control", control_port), ("connections, stream", stream_port)):
            part(name, 0.05, lambda part_s, port=port: fuzz_connections(port, part_s, 0, greetings[port], rng))  # type: ignore[misc]
        verdicts = _verdicts(running, model, good)
        verdicts |= {"start_mib": round(start_mib, 1), "start_descriptors": start_descriptors}
        verdicts["peak_mib"] = round(max(watch.rss_mib), 1)
        verdicts["address_space_grew_mib"] = round((watch.virtual("VmPeak") - before) / (1 << 20), 1)
    verdicts["exit_code_0"] = running.process.returncode == 0
    return Run(rows, [], verdicts)


def _good_answer(running: Server, model: Model) -> bytes:
    """The result of one good request: rows in the payload dtype."""
    peer = SharedFuzz(running, model)
    try:
        return peer.exchange(peer.peer.good_frame(4, rows=3), 4)[64:]
    finally:
        peer.close()


def _verdicts(running: Server, model: Model, good: bytes) -> dict[str, int | bool | float]:
    """What the server is like after everything."""
    right = running.alive() and _good_answer(running, model) == good
    client = ControlClient(running.address)
    try:
        client.connect(STEP_S)
        wait_for(lambda: client.stats(STEP_S).leases == 0, "the end of all leases")
        stats = client.stats(STEP_S)
        # Descriptors of connections that are gone are closed within moments.
        time.sleep(1.0)
        running.watch.look()
        return {
            "good_request_right": right,
            "tracebacks": running.tracebacks(),
            "leases_left": stats.leases,
            "experts_left": stats.resident_bytes,
            "end_mib": round(running.watch.rss_mib[-1], 1),
            "end_descriptors": running.watch.n_descriptors[-1],
            "log_kib": running.log.stat().st_size // 1024,
        }
    finally:
        client.close()


def fuzz_targets(seconds: float, seed: int, folder: Path, say: Callable[[Row], None], names: tuple[str, ...]) -> Run:
    """The targets of ``fuzz/``, one after the other, each in a process of its own."""
    if importlib.util.find_spec("atheris") is None:
        return Run([], ["the targets guided by coverage: atheris is not installed, or not built for this platform"], {})
    rows = []
    for name in names:
        command = [sys.executable, str(ROOT / "fuzz" / "run_target.py"), name, "-print_final_stats=1"]
        command += [f"-max_total_time={max(1, int(seconds / len(names)))}", f"-seed={seed}", "-timeout=20"]
        command += [f"-rss_limit_mb={TARGET_MIB}", f"-artifact_prefix={folder}/{name}-"]
        # Through a shell that forks once more: a process's peak memory, which libFuzzer looks at, begins with that of
        # the process that started it, and one that ran other tests before may have held more than the limit.
        command = ["sh", "-c", '"$@"; exit $?', "sh", *command]
        started = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        executed = re.search(r"number_of_executed_units:\s+(\d+)", done.stderr)
        if done.returncode:
            print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        rows.append(
            Row(
                f"target {name}",
                int(executed[1]) if executed else 0,
                round(time.monotonic() - started, 1),
                0,
                0,
                0,
                crashes=int(done.returncode != 0),
                hangs=0,
                over_limit=int("out-of-memory" in done.stderr),
                server_mib=None,
                descriptors=None,
                threads=None,
            )
        )
        say(rows[-1])
    return Run(rows, [], {})


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long everything takes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--server-device", default=CPU, help="where the server computes: cpu, cuda or cuda:N")
    arguments = parser.parse_args()
    whole = arguments.seconds >= WHOLE_S
    least = (FRAMES, CALLS) if whole else (0, 0)
    print(f"{'part':<22} {'inputs':>9} {'s':>6} {'good':>9} {'refused':>9} {'dropped':>9} {'crashes':>7} {'hangs':>5} "
          f"{'over limit':>10} {'MiB':>7} {'fds':>4} {'threads':>7}")  # fmt: skip

    def say(row: Row) -> None:
        print(f"{row.part:<22} {row.inputs:>9,} {row.seconds:>6.1f} {row.good:>9,} {row.refused:>9,} {row.dropped:>9,} "
              f"{row.crashes:>7} {row.hangs:>5} {row.over_limit:>10} {row.server_mib or '':>7} "
              f"{row.descriptors or '':>4} {row.threads or '':>7}", flush=True)  # fmt: skip

    with tempfile.TemporaryDirectory(prefix="moeoffload-fuzz-") as text:
        folder = Path(text)
        run = fuzz_server(0.7 * arguments.seconds, arguments.seed, least, folder, say, arguments.server_device)
        targets = fuzz_targets(0.3 * arguments.seconds, arguments.seed, folder, say, TARGETS)
        if run.failed:
            print((folder / "server.log").read_text(errors="replace")[-4000:], file=sys.stderr)
    run.rows += targets.rows
    for name, value in run.verdicts.items():
        print(f"{name.replace('_', ' ')}: {value}")
    for line in targets.skipped:
        print(f"skipped: {line}")
    if arguments.json:
        settings = {"seconds": arguments.seconds, "seed": arguments.seed, "quick": not whole, **run.verdicts}
        settings["server_device"] = arguments.server_device
        write_json(arguments.json, "fuzz", settings, run.rows)
    sys.exit(run.failed)


if __name__ == "__main__":
    main()
