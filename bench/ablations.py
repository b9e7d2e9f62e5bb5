"""What each path that exists only for speed brings: ``python bench/ablations.py --checkpoint DIR --json FILE``.

A contender with all paths takes turns with one that has a single path switched off, on the case where that path should
help most, in several pairs of processes; two equal contenders show the noise. *gain* is how much longer the task takes
without it. A path that brings less than 3 % is deleted, with its tests. Rows of deleted paths stay in the result with
the commit at which they were measured.
"""

from __future__ import annotations

import json as json_module
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from devices import CPU, HostDevice, ServerDevice
from duel import Opponent, duel
from local_model import benchmark_checkpoint
from rich.console import Console
from rich.table import Table
from servers import Spread, machine

from moeoffload.native import Features, cpu_features

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = ROOT / "moeoffload"
PAYS: Final = 1.03

Task = dict[str, Any]
DECODE: Final[Task] = {"task": "decode", "prompt": 64, "tokens": 16}
DECODE_LONG: Final[Task] = {"task": "decode", "prompt": 2048, "tokens": 12}
PREFILL_SHORT: Final[Task] = {"task": "prefill", "prompt": 64}
PREFILL: Final[Task] = {"task": "prefill", "prompt": 512}
PREFILL_LONG: Final[Task] = {"task": "prefill", "prompt": 2048}
HOSTS: Final[Task] = {"task": "hosts", "prompt": 64, "tokens": 8}
SERVED: Final[Task] = {"task": "served", "requests": 8, "tokens": 32}
SERVED_LONG: Final[Task] = {"task": "served", "requests": 4, "tokens": 8, "prompt": 1000}
SERVED_AGAIN: Final[Task] = {"task": "served", "requests": 4, "tokens": 32, "prompt": 2000, "again": True}


@dataclass(frozen=True)
class FastPath:
    """A path: its files below the package, how to do without it, and where it should help most."""

    name: str
    files: tuple[str, ...]
    tasks: tuple[Task, ...]
    host_patch: str = ""
    server_patch: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    server_options: tuple[str, ...] = ()
    always: dict[str, Any] = field(default_factory=dict)
    """Options of both contenders."""
    like: str = ""
    """The geometry of the model it needs, if that is another one; 4 layers of it are written."""

    def options(self, *, without: bool) -> dict[str, Any]:
        options: dict[str, Any] = {"settings": {"transport": "shared"}, "host_patch": ""} | self.always
        if without:
            options["settings"] = options["settings"] | self.settings
            options["host_patch"] = options["host_patch"] + self.host_patch
            options["server_patch"] = options.get("server_patch", "") + self.server_patch
            options["server_options"] = [*options.get("server_options", []), *self.server_options]
        return options


def no_dense(name: str) -> str:
    """A patch that leaves one kind of dense layer to torch."""
    return f"import moeoffload.kernels.fast_dense as f\nf.{name} = lambda model: None\n"


NO_SPIN: Final = """
import moeoffload.transport.spin as s
_made = s.AdaptiveSpin.__init__
s.AdaptiveSpin.__init__ = lambda self, limit_s=0.0: _made(self, 0.0)
"""
NO_HUGE_PAGES: Final = """
import moeoffload.huge_pages as h
h._madvise = lambda: None
"""
NO_MANY_QUERIES: Final = """
import moeoffload.kernels.attention as a
a.takes_many = lambda dtype: False
"""
NO_PAIRS: Final = """
import moeoffload.kernels.sdpa as s
import moeoffload.native as n
_attention, _features = s.cpu_attention, n.cpu_features
def attention(query, *args, **kwargs):
    n.cpu_features = _features if query.shape[2] > 16 else lambda: _features() & ~n.Features.BF16_DOT
    try:
        return _attention(query, *args, **kwargs)
    finally:
        n.cpu_features = _features
s.cpu_attention = attention
"""
NO_MATRIX_UNIT: Final = """
import moeoffload.native as n
_features = n.cpu_features()
n.cpu_features = lambda: _features & ~n.Features.MATRIX_UNIT
"""
NO_SHORTCUT: Final = """
import moeoffload.expert_server.engine as e
_submit = e.Engine.submit
def submit(self, channel, slot):
    if _submit(self, channel, slot) is not None:
        self._wake()
e.Engine.submit = submit
"""
NO_TILES: Final = """
import moeoffload.formats.tiles as t
t.multiplies_tiles = lambda parts, dtype: False
"""
THROUGH_CACHES: Final = """
import ctypes
import moeoffload.kernels.calls as c
c.library()
ctypes.c_int64.in_dll(c.native_library(), "passes_caches").value = 0
"""
AS_FOR_ONE_ROW: Final = """
import ctypes
import moeoffload.kernels.calls as c
c.library()
at = lambda name: ctypes.c_int64.in_dll(c.native_library(), name)
at("batch_ahead_bytes").value = 2 * at("ahead_bytes").value
"""
WHOLE_STEPS: Final = """
import moeoffload.serve.halves as h
h.cut = lambda shares: []
"""
COPIED_PAGES: Final = """
import moeoffload.serve.paged_attention as p
p.attention_if_fast = lambda *args, **kwargs: None
"""
SERVES: Final = {"served": True, "host_options": ["--expert-format", "int4", "--dense-format", "int4"]}
NOISE: Final = "nothing: two equal processes"
PATHS: Final = (
    FastPath(NOISE, (), (DECODE, PREFILL)),
    FastPath("spinning", ("transport/spin.py", "transport/spin.c"), (DECODE,), NO_SPIN, NO_SPIN),
    FastPath(
        "spinning over the stream",
        (),
        (DECODE,),
        NO_SPIN,
        NO_SPIN,
        always={"settings": {"transport": "stream", "expert_format": "int4"}},
    ),
    FastPath(
        "weights past the outer caches", ("kernels/cpu/ahead.c",), (DECODE, PREFILL), THROUGH_CACHES, THROUGH_CACHES
    ),
    FastPath(
        "weights prefetched further ahead for several rows",
        (),
        (PREFILL_SHORT,),
        AS_FOR_ONE_ROW,
        AS_FOR_ONE_ROW,
        always={"settings": {"expert_format": "int4", "dense_format": "int4"}},
    ),
    FastPath("huge pages", ("huge_pages.py",), (DECODE, PREFILL), NO_HUGE_PAGES, NO_HUGE_PAGES),
    FastPath(
        "few-row linear layers",
        ("kernels/dense.py", "kernels/cpu/linear.c"),
        (DECODE,),
        no_dense("accelerate_linears"),
    ),
    FastPath(
        "shared experts computed while servers compute",
        ("host/shared_experts.py",),
        (DECODE, PREFILL),
        "import moeoffload.host.session as s\n"
        "s.overlap_shared_experts = lambda model, checkpoint: [None] * len(checkpoint.layers)\n",
        like="qwen1.5-moe-a2.7b",
    ),
    FastPath(
        "attention of few rows in one call",
        ("kernels/fused_attention.py", "kernels/cpu/fused_attention.c", "kernels/cpu/rotary_rows.h"),
        (DECODE,),
        no_dense("fuse_attention"),
        always={"settings": {"expert_format": "int4", "dense_format": "int4"}},
    ),
    FastPath(
        "own norms",
        ("kernels/norm.py", "kernels/cpu/norm*"),
        (DECODE,),
        no_dense("accelerate_norms"),
        always={"settings": {"expert_format": "int4", "dense_format": "int4"}},
    ),
    FastPath(
        "own attention of few queries",
        ("kernels/attention.py", "kernels/sdpa.py", "kernels/cpu/attention*"),
        (DECODE_LONG,),
        no_dense("accelerate_attention"),
    ),
    FastPath(
        "own attention of many queries", ("kernels/cpu/attention_pairs.c",), (PREFILL, PREFILL_LONG), NO_MANY_QUERIES
    ),
    FastPath(
        "attention of few queries in pairs of bfloat16",
        (),
        (DECODE_LONG,),
        NO_PAIRS,
        always={"settings": {"expert_format": "int4", "dense_format": "int4"}},
    ),
    FastPath(
        "keys and values that grow in place",
        ("kernels/growing_cache.py",),
        (DECODE_LONG,),
        no_dense("accelerate_cache"),
        always={"settings": {"expert_format": "int4", "dense_format": "int4"}},
    ),
    FastPath("matrix unit", ("kernels/cpu/matrix_unit.c",), (PREFILL_LONG,), NO_MATRIX_UNIT, NO_MATRIX_UNIT),
    FastPath(
        "computing in the thread that receives",
        (),
        (DECODE,),
        server_patch=NO_SHORTCUT,
        always={"settings": {"transport": "shared", "expert_format": "int4"}},
    ),
    FastPath(
        "tiles of packed weights",
        ("formats/tiles.*", "kernels/cpu/tiles.h", "kernels/cpu/integer_body.h", "kernels/cpu/fp8_body.h"),
        (DECODE, PREFILL),
        NO_TILES,
        NO_TILES,
        always={"settings": {"transport": "shared", "expert_format": "int8"}},
    ),
    FastPath("halves of serving steps", ("serve/halves.py",), (SERVED, SERVED_LONG), WHOLE_STEPS, always=SERVES),
    FastPath("attention that reads pages in place", (), (SERVED_AGAIN,), COPIED_PAGES, always=SERVES),
    FastPath("prefill pipeline", ("host/pipeline.py",), (PREFILL, PREFILL_LONG), settings={"pipeline": "off"}),
    FastPath(
        "coalescing",
        ("expert_server/batcher.py",),
        (HOSTS,),
        server_options=("--no-coalesce",),
        always={"hosts": 4},
    ),
)


@dataclass(frozen=True)
class Row:
    """Seconds with and without, and how many times as long it took without, turn by turn."""

    path: str
    task: str
    cpu: str
    lines: int
    with_s: Spread
    without_s: Spread
    gain: Spread
    turns: list[float]
    verdict: str
    commit: str


def lines_of(files: tuple[str, ...]) -> int:
    """Lines of the files below the package that these patterns match."""
    found = {path for pattern in files for path in PACKAGE.glob(pattern)}
    return sum(len(path.read_text().splitlines()) for path in found)


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder; default: one is written.")] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the figures to this file, beside those of other paths.")
    ] = None,
    only: Annotated[str, typer.Option(help="Names of paths, with commas; default: all.")] = "",
    turns: int = 7,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Measure each path with and without."""
    console = Console(width=130)
    wanted = {name.strip() for name in only.split(",")} if only else {path.name for path in PATHS}
    if unknown := wanted - {path.name for path in PATHS}:
        raise SystemExit(
            f"no path is called {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in PATHS)}"
        )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    on = {"host_device": host_device, "server_device": server_device}
    rows: list[Row] = []
    cpu = machine()["cpu"] + (" with a matrix unit" if cpu_features() & Features.MATRIX_UNIT else "")
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint or benchmark_checkpoint(Path(folder) / "model")
        for path in PATHS:
            if path.name not in wanted:
                continue
            its_model = benchmark_checkpoint(Path(folder) / path.like, like=path.like) if path.like else model
            ours, without = (
                partial(Opponent, its_model, path.options(without=switched_off) | on, ROOT)
                for switched_off in (False, True)
            )
            found = duel(ours, without, path.tasks, turns)
            pays = max(result.ratio.median for result in found) >= PAYS
            for each in found:
                verdict = "noise" if path.name == NOISE else "kept" if pays else "does not pay"
                values = each.first_s, each.second_s, each.ratio, each.turns
                rows.append(Row(path.name, each.task, cpu, lines_of(path.files), *values, verdict, commit))
                console.print(f"  {path.name}, {each.task}: x {each.ratio:.3f} {verdict}", style="dim")
    table = Table(title=f"{cpu}; how many times as long it takes without (least-greatest)")
    for column in ("path", "task", "lines", "with s", "without s", "gain", "verdict"):
        table.add_column(column)
    for row in rows:
        figures = (f"{row.with_s:.3f}", f"{row.without_s:.3f}", f"{row.gain:.3f}")
        table.add_row(row.path, row.task, str(row.lines), *figures, row.verdict)
    console.print(table)
    if json is not None:
        _merge(json, [asdict(row) for row in rows], cpu, {"turns": turns} | on)


def _merge(path: Path, rows: list[dict[str, Any]], cpu: str, settings: dict[str, Any]) -> None:
    """Writes ``rows`` in place of those of the same paths on the same kind of machine; the others stay."""
    old = json_module.loads(path.read_text())["rows"] if path.exists() else []
    measured = {row["path"] for row in rows}
    data = {"benchmark": "ablations", "machine": machine(), "settings": settings}
    data["rows"] = rows + [row for row in old if row["cpu"] != cpu or row["path"] not in measured]
    path.write_text(json_module.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
