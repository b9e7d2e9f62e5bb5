"""Expert servers behind a cable of a given speed: ``python bench/cable.py --checkpoint DIR --json FILE``, as root.

The server lives in a network namespace of its own, at the other end of a pair of virtual cards that let through so many
bits a second (tc's token bucket, both ways). The same prompt and the same tokens with rows in bfloat16 and in 8 bits,
and with llama.cpp's RPC server where `llama_cpp.py` has built it, in turns; a core for each side. The limit is the time
in which the rows of a prompt pass the cable, each way, if nothing else took any.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from contender import Direct
from devices import CPU, HostDevice, ServerDevice
from llama_cpp import CACHE, TOOLS, LlamaCpp, gguf_files, rpc_server
from local_model import benchmark_checkpoint
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, write_json
from virtual_cable import FAR_CARD, STEP_S, virtual_cable

from moeoffload import OffloadedModel, open_model

NAME, CARD = f"cable-{os.getpid()}", f"cab{os.getpid() % 1_000_000}"
NEAR, FAR = "10.87.0.1", "10.87.0.2"
INSIDE: Final = ["ip", "netns", "exec", NAME]
BURST_BYTES: Final = 256 << 10
DECODED: Final = 32
WAYS: Final[dict[str, dict[str, Any]]] = {"bf16": {"dtype": "bf16"}, "f8": {"dtype": "f8"}}
PEER_GBIT: Final = 1.0


@dataclass(frozen=True)
class Row:
    """A contender behind a cable; speeds in tokens per second, MB of a prompt both ways."""

    gbit: float
    system: str
    prefill: Spread
    decode: Spread
    of_bf16: Spread
    """Prefill beside that of bfloat16 rows in the same turn."""
    megabytes: float | None
    limit_s: float | None
    prefill_s: float


def set_speed(gbit: float) -> None:
    """Lets so many Gbit/s through the cable, each way."""
    for prefix, card in ([], CARD), (INSIDE, FAR_CARD):
        words = ["tc", "qdisc", "replace", "dev", card, "root", "tbf", "rate", f"{gbit * 1000:g}mbit"]
        words += ["burst", str(max(BURST_BYTES, int(gbit * 1e9 / 8 / 1000))), "latency", "50ms"]
        subprocess.run([*prefix, *words], check=True, timeout=STEP_S)


@contextlib.contextmanager
def far_server(checkpoint: Path, device: str) -> Iterator[str]:
    """An expert server at the other end; yields its address."""
    words = ["--listen", f"{FAR}:0", "--insecure", "--model", str(checkpoint), "--device", device, "--threads", "1"]
    command = [*INSIDE, "taskset", "-c", str(cores()[1]), sys.executable]
    command += ["-m", "moeoffload.cli.expert_app", "--exit-with-stdin", "--log-level", "error", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = re.search(r"ready on (\S+)", process.stdout.readline())
        if ready is None:
            raise SystemExit("the expert server did not start")
        try:
            yield ready[1]
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=STEP_S)
            process.kill()


class Ours:
    """A host on this side."""

    def __init__(self, offloaded: OffloadedModel, prompt: int) -> None:
        self._offloaded, self._prompt = offloaded, prompt
        self._model = Direct([offloaded.model])

    def measure(self) -> dict[str, float]:
        """Tokens per second of prefill and decode, and the MB that a prompt sends and receives."""
        self._offloaded.recorder.reset()
        prefill = self._prompt / self._model.run({"task": "prefill", "prompt": self._prompt})
        phase = self._offloaded.report().to_json()["phases"]["prefill"]
        n_bytes = phase["bytes_out"] + phase["bytes_back"]
        decode = DECODED / self._model.run({"task": "decode", "prompt": 16, "tokens": DECODED})
        return {"prefill": prefill, "decode": decode, "megabytes": n_bytes / 1e6}


class Theirs:
    """llama.cpp on this side."""

    def __init__(self, inner: LlamaCpp, prompt: int) -> None:
        self._inner, self._prompt = inner, prompt

    def measure(self) -> dict[str, float]:
        """As `Ours`, without the bytes."""
        found = self._inner.measure()
        return {"prefill": found[f"prefill_{self._prompt}"], "decode": found["decode"]}


def rows_of(gbit: float, prompt: int, found: dict[str, list[dict[str, float]]]) -> Iterator[Row]:
    """A row for each contender."""
    for system, turns in found.items():
        prefill = Spread.of([turn["prefill"] for turn in turns])
        megabytes = turns[0].get("megabytes")
        yield Row(
            gbit=gbit,
            system=system,
            prefill=prefill,
            decode=Spread.of([turn["decode"] for turn in turns]),
            of_bf16=Spread.of([a["prefill"] / b["prefill"] for a, b in zip(turns, found["bf16"], strict=True)]),
            megabytes=megabytes,
            limit_s=None if megabytes is None else megabytes / 2 * 8e6 / (gbit * 1e9),
            prefill_s=prompt / prefill.median,
        )


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="A Qwen3 MoE in bf16. Default: one is written.")] = None,
    speeds: Annotated[str, typer.Option(help="Gbit/s, with commas.")] = "10,1,0.1",
    prompt: Annotated[int, typer.Option(min=16, help="Tokens.")] = 2048,
    turns: Annotated[int, typer.Option(min=1)] = 3,
    cache: Annotated[Path, typer.Option(help="Where llama_cpp.py has its files.")] = CACHE,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the result goes.")] = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Measure a prompt and the tokens after it behind cables of several speeds."""
    model = checkpoint or benchmark_checkpoint(cache / "qwen3-30b-a3b-4")
    os.sched_setaffinity(0, {cores()[0]})
    torch.set_num_threads(1)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(virtual_cable(NAME, CARD, NEAR, FAR))
        address = stack.enter_context(far_server(model, server_device))
        common: dict[str, Any] = {"experts": [address], "device": host_device, "insecure": True, "transport": "stream"}
        contenders: dict[str, Ours | Theirs] = {
            name: Ours(stack.enter_context(open_model(model, **common, **way)), prompt) for name, way in WAYS.items()
        }
        tools = cache / "llama.cpp" / "bin"
        if all((tools / tool).exists() for tool in TOOLS):
            file = gguf_files(model, cache, tools, ["BF16"])["BF16"]
            port = stack.enter_context(rpc_server(tools, FAR, INSIDE))
            contenders["llama.cpp"] = Theirs(LlamaCpp(tools, file, port, [prompt], FAR), prompt)
        for gbit in map(float, speeds.split(",")):
            set_speed(gbit)
            # Over a slower cable llama.cpp takes minutes for a prompt.
            here = {name: each for name, each in contenders.items() if gbit >= PEER_GBIT or name in WAYS}
            found: dict[str, list[dict[str, float]]] = {name: [] for name in here}
            for turn in range(turns + 1):
                for name, contender in here.items():
                    measured = contender.measure()
                    if turn:
                        found[name].append(measured)
            rows += rows_of(gbit, prompt, found)
    table = Table(title=f"a prompt of {prompt:,} tokens, then {DECODED}; median of {turns} turns")
    for column in ("Gbit/s", "", "prefill tok/s", "of bf16", "decode tok/s", "MB", "limit s", "prefill s"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        of_wire = [f"{row.megabytes:.1f}", f"{row.limit_s:.2f}"] if row.megabytes and row.limit_s else ["–", "–"]
        speeds_of = (f"{row.prefill:.0f}", f"{row.of_bf16:.2f}", f"{row.decode:.1f}")
        table.add_row(f"{row.gbit:g}", row.system, *speeds_of, *of_wire, f"{row.prefill_s:.2f}")
    Console(width=140).print(table)
    if json is not None:
        on = {"host_device": host_device, "server_device": server_device}
        write_json(json, "cable", {"prompt": prompt, "decoded": DECODED, "turns": turns} | on, rows)


if __name__ == "__main__":
    typer.run(main)
