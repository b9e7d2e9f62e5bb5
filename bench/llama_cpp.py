"""Ours against llama.cpp on the same weights, in turns: ``python bench/llama_cpp.py --checkpoint DIR --json F``.

Takes llama.cpp from the source package of llama-cpp-python, builds it once into ``--cache``, writes the checkpoint as
GGUF, and lets its own tool quantise it. Each contender has one thread per process: local ones on one core, remote ones
with a host on one core and the experts on the other. The limit of decode is the time in which a core reads the weights
of a token.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from devices import CPU, HostDevice, ServerDevice
from duel import STARTS, Opponent
from gguf import GGUFReader
from limits import read_bandwidth
from local_model import benchmark_checkpoint
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, write_json
from synthetic.gguf_file import write_gguf

PACKAGE: Final = "llama-cpp-python==0.3.36"
TOOLS: Final = ("ggml-rpc-server", "llama-bench", "llama-quantize")
NOT_BUILT: Final = ("CURL", "BUILD_TESTS", "BUILD_EXAMPLES")
# Its code for AMX fails with a segmentation fault in this version, on one thread and on several.
FLAGS: Final = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
LANGUAGES: Final = ("C", "CXX") if platform.machine() == "x86_64" else ()
OPTIONS: Final = (
    "GGML_RPC=ON",
    "GGML_NATIVE=ON",
    "CMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "CMAKE_INSTALL_RPATH=$ORIGIN",  # the tools find their libraries wherever they are copied to
    *(f"LLAMA_{part}=OFF" for part in NOT_BUILT),
    *(f"CMAKE_{language}_FLAGS={FLAGS}" for language in LANGUAGES),
)
CACHE: Final = Path.home() / ".cache/moeoffload-bench"
EXPERTS: Final = "ffn_.*_exps"
LOOPBACK: Final = "127.0.0.1"
DECODED: Final = 32
TURNS: Final = 5
CALL_S: Final = 900.0
ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """Tokens per second of one contender with one format of weights; every turn is listed."""

    weights: str
    system: str
    where: str
    prefill_512: Spread
    prefill_2048: Spread | None
    decode: Spread
    decode_limit: float
    turns: list[dict[str, float]]


def build(cache: Path) -> Path:
    """The folder of llama.cpp's tools, built once."""
    tools = cache / "llama.cpp" / "bin"
    if all((tools / tool).exists() for tool in TOOLS):
        return tools
    missing = [word for word in ("cmake", "ninja", "c++") if shutil.which(word) is None]
    if missing:
        raise SystemExit(f"llama.cpp is built from source, and {' and '.join(missing)} cannot be found")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        print(f"building llama.cpp from {PACKAGE}, some minutes, once", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", folder, PACKAGE], check=True)
        (package,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(package) as archive:
            archive.extractall(folder, filter="data")
        (source,) = Path(folder).glob("*/vendor/llama.cpp")
        made = source / "build"
        configure = ["cmake", "-B", str(made), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
        subprocess.run([*configure, *(f"-D{option}" for option in OPTIONS)], cwd=source, check=True)
        subprocess.run(["cmake", "--build", str(made), "--target", *TOOLS], check=True)
        shutil.copytree(made / "bin", tools, dirs_exist_ok=True)
    return tools


def gguf_files(checkpoint: Path, cache: Path, tools: Path, types: Sequence[str]) -> dict[str, Path]:
    """The checkpoint as GGUF in each of ``types``, written once."""
    files = {kind: cache / f"{checkpoint.resolve().name}-{kind}.gguf" for kind in ("BF16", *types)}
    for kind, file in files.items():
        if file.exists():
            continue
        part = file.with_suffix(".part")  # a run that is ended meanwhile leaves no half file
        if kind == "BF16":
            write_gguf(checkpoint, part)
        else:
            command = [str(tools / "llama-quantize"), str(files["BF16"]), str(part), kind, str(os.cpu_count())]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        part.rename(file)
    return {kind: files[kind] for kind in types}


def read_bytes(file: Path) -> float:
    """Bytes of weights that a token asks for; of the embedding it is one row."""
    reader = GGUFReader(file)
    used, held = (reader.fields[f"qwen3moe.expert_{name}"].contents() for name in ("used_count", "count"))
    sizes = {tensor.name: tensor.n_bytes for tensor in reader.tensors if tensor.name != "token_embd.weight"}
    return sum(size * used / held if "_exps" in name else size for name, size in sizes.items())


class LlamaCpp:
    """llama.cpp with one thread, its experts here or on its RPC server."""

    def __init__(
        self, tools: Path, file: Path, rpc_port: int | None, prompts: Sequence[int], address: str = LOOPBACK
    ) -> None:
        host_core, _ = cores()
        self._command = ["taskset", "-c", str(host_core), str(tools / "llama-bench"), "-m", str(file)]
        self._command += ["-t", "1", "-ngl", "0", "-r", "1", "-o", "json", "-n", str(DECODED)]
        self._command += ["-p", ",".join(map(str, prompts))]
        if rpc_port is not None:
            device = f"{address}:{rpc_port}"
            self._command += ["-rpc", device, "-ot", f"{EXPERTS}=RPC0[{device}]"]

    def measure(self) -> dict[str, float]:
        """Tokens per second of each task."""
        done = subprocess.run(self._command, check=False, capture_output=True, text=True, timeout=CALL_S)
        if done.returncode:
            raise SystemExit(f"llama-bench failed: {done.stderr.strip().splitlines()[-1]}")
        found = {}
        for result in json.loads(done.stdout):
            found["decode" if result["n_gen"] else f"prefill_{result['n_prompt']}"] = float(result["avg_ts"])
        return found


@contextlib.contextmanager
def rpc_server(tools: Path, address: str = LOOPBACK, before: Sequence[str] = ()) -> Iterator[int]:
    """llama.cpp's RPC server on the server's core, behind the command ``before``; yields its port."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port: int = free.getsockname()[1]
    words = [*before, "taskset", "-c", str(cores()[1]), str(tools / "ggml-rpc-server")]
    words += ["-H", address, "-p", str(port), "-t", "1"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
                break
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


class Ours:
    """A host with its expert server, or one that holds all experts itself."""

    def __init__(self, opponent: Opponent, prompts: Sequence[int]) -> None:
        self._opponent = opponent
        self._prompts = prompts

    def measure(self) -> dict[str, float]:
        """Tokens per second of each task."""
        found = {f"prefill_{n}": n / self._opponent.run({"task": "prefill", "prompt": n}) for n in self._prompts}
        decode = {"task": "decode", "prompt": 16, "tokens": DECODED}
        return found | {"decode": DECODED / self._opponent.run(decode)}


def compare(
    tools: Path, kind: str, file: Path, ours: Path, turns: int, limit: float, prompts: Sequence[int], on: dict[str, str]
) -> list[Row]:
    """All contenders with one format, in turns: ours in ``STARTS`` fresh pairs of processes, since where a process's
    memory happens to lie makes it several percent faster or slower. The first turn of each start does not count."""
    settings = {"remote": {}, "local": {"local_experts_gib": 64}}
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(STARTS):
        with contextlib.ExitStack() as stack:
            port = stack.enter_context(rpc_server(tools))
            contenders: dict[tuple[str, str], LlamaCpp | Ours] = {
                ("llama.cpp", "remote"): LlamaCpp(tools, file, port, prompts),
                ("llama.cpp", "local"): LlamaCpp(tools, file, None, prompts),
            }
            for where, words in settings.items():
                opponent = stack.enter_context(Opponent(ours, {"settings": words, **on}, ROOT))
                contenders["moeoffload", where] = Ours(opponent, prompts)
            for turn in range(-(-turns // STARTS) + 1):
                for name, contender in contenders.items():
                    speeds = contender.measure()
                    if turn:
                        found.setdefault(name, []).append(speeds)
    rows = []
    for (system, where), done in found.items():
        spreads: dict[str, Any] = {"prefill_2048": None}
        spreads |= {task: Spread.of([each[task] for each in done]) for task in done[0]}
        rows.append(Row(kind, system, where, **spreads, decode_limit=limit, turns=done))
    return rows


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="A Qwen3 MoE in bf16. Default: one is written.")] = None,
    types: Annotated[str, typer.Option(help="GGUF types, with commas.")] = "BF16,Q8_0,Q4_K_M",
    turns: Annotated[int, typer.Option(min=1)] = TURNS,
    long: Annotated[bool, typer.Option(help="Prompts of 2,048 tokens, too.")] = True,
    cache: Annotated[Path, typer.Option(help="For llama.cpp and the files.")] = CACHE,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Compare with llama.cpp, its RPC server and local."""
    cache.mkdir(parents=True, exist_ok=True)
    tools = build(cache)
    model = checkpoint or benchmark_checkpoint(cache / "qwen3-30b-a3b-4")
    files = gguf_files(model, cache, tools, types.split(","))
    torch.set_num_threads(1)
    rate = read_bandwidth()
    on = {"host_device": host_device, "server_device": server_device}
    rows: list[Row] = []
    prompts = (512, 2048) if long else (512,)
    for kind, file in files.items():
        rows += compare(tools, kind, file, file, turns, rate / read_bytes(file), prompts, on)
        show(rows)
        if json_file is not None:
            settings: dict[str, Any] = {"turns": turns, "package": PACKAGE, "decoded": DECODED} | on
            write_json(json_file, "llama_cpp", settings, rows)


def show(rows: Sequence[Row]) -> None:
    """Prints a table, with each contender's ratio to llama.cpp in the same place."""
    table = Table(
        "weights", "system", "experts", "prefill 512", "prefill 2,048", "decode tok/s", "limit", "x llama.cpp"
    )
    theirs = {(row.weights, row.where): row for row in rows if row.system == "llama.cpp"}
    for row in rows:
        other = theirs[row.weights, row.where]
        ratio = row.decode.median / other.decode.median
        longest = "–" if row.prefill_2048 is None else f"{row.prefill_2048:.0f}"
        speeds = f"{row.prefill_512:.0f}", longest, f"{row.decode:.1f}", f"{row.decode_limit:.0f}"
        table.add_row(row.weights, row.system, row.where, *speeds, f"{ratio:.2f}")
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
