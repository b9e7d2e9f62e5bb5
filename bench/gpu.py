"""All that has to be shown on a GPU, in parts of a few minutes: ``python bench/gpu.py --part devices --json FILE``.

``devices``: driver, GPUs, versions, rates of copies. ``tests``: what ``make gpu`` runs, by file. ``kernels``: the
programs of four geometries beside their limit. ``model``: Qwen3-30B-A3B's geometry with four layers, decode and prefill
with remote and with local experts in turns, and what the host launches, copies and waits for in each layer. ``faults``:
servers killed in mid-decode. Needs no network. ``--host-device cpu --server-device cpu`` rehearses a part where there
is no GPU; its figures mean nothing.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from json import loads
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Final
from xml.etree import ElementTree

import torch
import typer
from devices import HostDevice, ServerDevice
from kernels_cuda import Clock, copy_bytes_per_s
from local_model import benchmark_checkpoint
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, expert_server, write_json
from transformers import DynamicCache

from moeoffload import open_model
from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.copy_buffers import CopyBuffers

ROOT: Final = Path(__file__).parents[1]
PART_S: Final = 520.0
"""A part ends before the ten minutes that a lent machine gives to a command."""
GEOMETRIES: Final = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "olmoe-1b-7b")
FEW_ROWS: Final = (1, 8, 16)
PROMPT, DECODED, TURNS = 512, 64, 5


class Part(StrEnum):
    """What is shown."""

    DEVICES = "devices"
    TESTS = "tests"
    KERNELS = "kernels"
    MODEL = "model"
    FAULTS = "faults"


@dataclass(frozen=True)
class Row:
    """One figure, with its limit where it has one; ``of_limit`` is their ratio."""

    name: str
    value: str
    limit: str = ""
    of_limit: float | None = None


def devices(device: torch.device, _: torch.device, __: Path) -> Iterator[Row]:
    """What is here, and how fast bytes move."""
    yield Row("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}")
    for module in ("transformers", "triton"):
        code = f"import {module}; print({module}.__version__)"
        done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
        yield Row(module, done.stdout.strip() or "not installed")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        for line in done.stdout.splitlines():
            yield Row("driver", line.strip())
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        yield Row(f"cuda:{number}", f"{found.name}, {found.major}.{found.minor}, {found.total_memory >> 20} MiB")
    clock, n_bytes = Clock(device, 10), 1 << 28
    yield Row("copy on the device", f"{copy_bytes_per_s(clock, device, n_bytes) / 1e9:.0f} GB/s read and written")
    there = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    here = torch.ones(n_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, to, source in (("to the device", there, here), ("from the device", here, there)):
        us = clock.wall_us(lambda _, to=to, source=source: to.copy_(source, non_blocking=True)).median  # type: ignore[misc]
        yield Row(f"page-locked {name}", f"{n_bytes / us / 1e3:.1f} GB/s")


def tests_environment(host: torch.device, server: torch.device) -> dict[str, str]:
    """Of the tests, which choose their devices themselves: all that there are, or a rehearsal on the CPU."""
    return os.environ | {"TESTS_ON_GPU": "1" if "cuda" in (host.type, server.type) else "rehearsal"}


def tests(host: torch.device, server: torch.device, folder: Path) -> Iterator[Row]:
    """A row for each file of tests; each failure is named."""
    report = folder / "junit.xml"
    environment = tests_environment(host, server)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["tests/on_gpu", "tests/gpu_kernels", "tests/test_staging.py"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, check=False, cwd=ROOT, env=environment, timeout=PART_S)
    counts: dict[str, list[int]] = {}
    failed = []
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        ends = {child.tag for child in case} & {"failure", "error", "skipped"}
        count = counts.setdefault(case.get("classname", ""), [0, 0, 0])
        count[0 if not ends else 2 if ends == {"skipped"} else 1] += 1
        failed += [f"{case.get('name')}"] if ends & {"failure", "error"} else []
    for name, (passed, bad, skipped) in counts.items():
        yield Row(name, f"{passed} passed, {bad} failed, {skipped} skipped", of_limit=passed / max(1, passed + bad))
    yield Row("failed", ", ".join(failed) or ("none" if counts else "not ended in time"))


def kernels(_: torch.device, device: torch.device, folder: Path) -> Iterator[Row]:
    """`kernels_cuda.py` for each geometry, and for one in float16: the programs at few rows beside their limit."""
    runs = [(name, "bf16") for name in GEOMETRIES] + [(GEOMETRIES[0], "f16")]
    for name, dtype in runs:
        result = folder / f"{name}-{dtype}.json"
        command = [sys.executable, str(ROOT / "bench" / "kernels_cuda.py"), "--geometry", name, "--dtype", dtype]
        command += ["--json", str(result), "--device", str(device)]
        command += [] if device.type == "cuda" else ["--smoke"]
        environment = os.environ | ({} if device.type == "cuda" else {"TRITON_INTERPRET": "1"})
        done = subprocess.run(
            command, check=False, env=environment, timeout=PART_S / len(runs), stdout=subprocess.DEVNULL
        )
        if done.returncode:
            yield Row(f"{name} {dtype}", f"exit code {done.returncode}")
            continue
        for row in loads(result.read_text())["rows"]:
            if row["contender"] == "triton" and row["n_rows"] in FEW_ROWS:
                share = row["limit_us"] / row["queued_us"]
                limit = f"{row['limit_us']:.1f} µs, {row['limit']}"
                yield Row(f"{name} {dtype}, {row['n_rows']} rows", f"{row['queued_us']:.1f} µs", limit, share)


def step(model: Any, prompt: torch.Tensor, n_tokens: int) -> tuple[float, float]:
    """Seconds of a prompt and of the greedy tokens after it."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        begun = perf_counter()
        logits = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        token.tolist()  # waits
        first = perf_counter()
        for _ in range(n_tokens):
            token = model(token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
            token.tolist()
        return first - begun, perf_counter() - first


def events_of(model: Any, device: torch.device, n_layers: int) -> Iterator[Row]:
    """What a decode step launches, copies and waits for on the host, per layer, as torch's profiler counts it."""
    prompt = torch.ones(1, 16, dtype=torch.long, device=device)
    step(model, prompt, 4)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    with torch.profiler.profile(activities=kinds) as profile:
        step(model, prompt, DECODED)
    counted = {"launches": ("cudaLaunchKernel", "cuLaunchKernel"), "copies": ("cudaMemcpyAsync",)}
    counted |= {"waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")}
    averages = profile.key_averages()
    for name, keys in counted.items():
        n = sum(each.count for each in averages if each.key.startswith(keys))
        yield Row(f"{name} a layer", f"{n / n_layers / DECODED:.1f}")
    cpu_us = sum(each.self_cpu_time_total for each in averages)
    yield Row("CPU µs a layer", f"{cpu_us / n_layers / DECODED:.0f} (with the profiler)")


def loading(folder: Path, device: torch.device) -> Iterator[Row]:
    """Experts of a layer from files that are in memory, copied by the driver's own buffers and by ours, in turns."""
    checkpoint = Checkpoint.open(folder)
    about = checkpoint.layers[0]
    n_bytes, rates = about.n_experts * about.expert_bytes, dict[str, list[float]]()
    with CopyBuffers() as buffers:
        for turn in range(TURNS + 1):
            for way, through in (("pageable", None), ("page-locked", buffers)):
                begun = perf_counter()
                checkpoint.build_experts(0, range(about.n_experts), device, buffers=through)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                rates.setdefault(way, []).extend([n_bytes / (perf_counter() - begun) / 1e9] if turn else [])
    best = Spread.of(rates["pageable"]).median
    for way, figures in rates.items():
        yield Row(f"loading, {way}", f"{Spread.of(figures):.2f} GB/s", f"{best:.2f}", Spread.of(figures).median / best)


def model(device: torch.device, server_device: torch.device, folder: Path) -> Iterator[Row]:
    """Remote beside local experts, in turns; the limit of remote is local, that of decode the read rate as well."""
    checkpoint = benchmark_checkpoint(folder / "g4", layers=4 if device.type == "cuda" else 1)
    prompt = torch.randint(5, 1000, (1, PROMPT), generator=torch.manual_seed(1)).to(device)
    yield from loading(checkpoint, device)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(expert_server(cores()[1], device=str(server_device)))
        ways: dict[str, Any] = {
            "remote, shared": {"experts": [server], "transport": "shared"},
            "remote, stream": {"experts": [server], "transport": "stream"},
            "local": {"local_experts_gib": 64},
        }
        opened = {
            way: stack.enter_context(open_model(checkpoint, device=str(device), **options))
            for way, options in ways.items()
        }
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(TURNS + 1):
            for way, offloaded in opened.items():
                seconds = step(offloaded.model, prompt, DECODED)
                if turn:
                    found[way].append(seconds)
        speeds = {
            way: [Spread.of([n / seconds[at] for seconds in turns]) for at, n in enumerate((PROMPT, DECODED))]
            for way, turns in found.items()
        }
        for at, task in enumerate(("prefill", "decode")):
            best = speeds["local"][at].median
            for way, spreads in speeds.items():
                yield Row(f"{task}, {way}", f"{spreads[at]:.1f} tok/s", f"{best:.1f}", spreads[at].median / best)
        n_layers = len(opened["local"].checkpoint.layers)
        for way in ("remote, shared", "local"):
            for row in events_of(opened[way].model, device, n_layers):
                yield Row(f"{way}: {row.name}", row.value)


def faults(host: torch.device, server: torch.device, _: Path) -> Iterator[Row]:
    """Twenty servers killed in mid-decode: the tokens, and the longest answer beside an undisturbed one."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "killed", "tests/on_gpu"]
    environment = tests_environment(host, server)
    passed = 0
    begun = perf_counter()
    rounds = 0
    while rounds < 10 and perf_counter() - begun < PART_S / 2:
        rounds += 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            passed += not subprocess.run(command, check=False, cwd=ROOT, env=environment, timeout=PART_S / 2).returncode
    yield Row(
        "kills over both transports", f"{passed} of {rounds} rounds with the same tokens", of_limit=passed / rounds
    )


PARTS: Final[dict[Part, Callable[[torch.device, torch.device, Path], Iterator[Row]]]] = {
    Part.DEVICES: devices, Part.TESTS: tests, Part.KERNELS: kernels, Part.MODEL: model, Part.FAULTS: faults,
}  # fmt: skip


def main(
    part: Annotated[Part, typer.Option(help="What to show.")],
    host_device: HostDevice = "cuda",
    server_device: ServerDevice = "cuda",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the result goes.")] = None,
) -> None:
    """Show one part."""
    with tempfile.TemporaryDirectory() as folder:
        rows = list(PARTS[part](torch.device(host_device), torch.device(server_device), Path(folder)))
    table = Table(title=f"{part}, host on {host_device}, server on {server_device}")
    for column in ("", "value", "limit", "of limit"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.name, row.value, row.limit, "" if row.of_limit is None else f"{row.of_limit:.0%}")
    Console(width=140).print(table)
    if json is not None:
        write_json(json, "gpu", {"part": part.value, "host_device": host_device, "server_device": server_device}, rows)
    if any(row.of_limit is not None and row.of_limit < 1 for row in rows) and part in (Part.TESTS, Part.FAULTS):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
