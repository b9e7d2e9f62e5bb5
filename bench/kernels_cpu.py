"""Speed of the CPU kernels on one core, beside its memory's and torch's limits, and beside transformers.

``python bench/kernels_cpu.py``: one layer of routed experts (Qwen3-30B-A3B: hidden 2048, width 768, 128 experts, top-8)
and two linear layers. Times are this thread's processor time, so that other work on the machine is not counted; kernels
take turns in every round; each call has other routes, so weights come from memory. Limits are measured in the same
rounds: reading is a compiled sum over the same weights, multiplying is torch's product of 1024 x 2048 and 2048 x 1536.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numba import njit
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, write_json
from synthetic import geometry_config
from torch.nn import functional
from transformers.integrations import moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moeoffload.kernels import LayerKernels, few_row_linear, prefer_huge_pages, prepare_layer
from moeoffload.kernels.dense import MAX_ROWS

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
LINEARS = ((4096, 2048), (32000, 2048))
READ_BYTES = 64 << 20
N_ROUTINGS = 16
LEAST_ROUNDS = 7


@dataclass(frozen=True)
class Row:
    """One kernel at one number of rows. Rates count the weights read (each expert once) and the products' operations.

    ``of_read`` and ``of_product`` are the shares of what reading and multiplying allow.
    """

    layer: str
    dtype: str
    rows: int
    kernel: str
    ms: Spread
    gb_per_s: float
    of_read: float
    gflop_per_s: float
    of_product: float


@dataclass(frozen=True)
class Contestant:
    """Something to time: ``run`` gets the number of the round."""

    name: str
    run: Callable[[int], object]


@njit(nogil=True)
def read(values: Any) -> int:
    """Sum of int64 values in four streams: the fastest reading that was found, faster than one stream."""
    part = values.size // 4
    a = b = c = d = 0
    for i in range(part):
        a += values[i]
        b += values[part + i]
        c += values[2 * part + i]
        d += values[3 * part + i]
    return a + b + c + d


class Reader:
    """Reads the next part of some weights in every call."""

    def __init__(self, weights: torch.Tensor) -> None:
        self._values = np.asarray(weights.view(-1).view(torch.int64).numpy())
        self._start = 0

    def __call__(self, _: int) -> int:
        count = READ_BYTES // 8
        self._start = (self._start + count) % (self._values.size - count)
        return int(read(self._values[self._start : self._start + count]))


def timed(contestants: Sequence[Contestant], rounds: int) -> dict[str, Spread]:
    """Seconds of processor time by name; in turns."""
    for contestant in contestants:
        contestant.run(0)
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        for contestant in contestants:
            started = thread_time()
            contestant.run(number)
            seconds[contestant.name].append(thread_time() - started)
    return {name: Spread.of(values) for name, values in seconds.items()}


def rows_of(  # what one table is made of
    layer: str,
    dtype: torch.dtype,
    n_rows: int,
    spreads: dict[str, Spread],
    product_flop: float,
    n_bytes: float,
    n_flop: float,
) -> list[Row]:
    read_rate = READ_BYTES / spreads.pop("read").median
    product_rate = product_flop / spreads.pop("product").median
    limits = [Row(layer, str(dtype), n_rows, "limit", Spread(0, 0, 0), read_rate / 1e9, 1.0, product_rate / 1e9, 1.0)]
    return limits + [
        Row(
            layer,
            str(dtype),
            n_rows,
            name,
            Spread(seconds.median * 1e3, seconds.low * 1e3, seconds.high * 1e3),
            n_bytes / seconds.median / 1e9,
            n_bytes / seconds.median / read_rate,
            n_flop / seconds.median / 1e9,
            n_flop / seconds.median / product_rate,
        )
        for name, seconds in spreads.items()
    ]


def product(dtype: torch.dtype) -> tuple[Contestant, float]:
    """torch's product of two large matrices, and its operations."""
    left, right = torch.randn(1024, 2048).to(dtype), torch.randn(1536, 2048).to(dtype)
    return Contestant("product", lambda _: functional.linear(left, right)), 2.0 * 1024 * 2048 * 1536


def make_experts(dtype: torch.dtype, huge_pages: bool) -> Any:
    """One layer's experts with random weights."""
    config = geometry_config("qwen3-30b-a3b", layers=1)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        experts: Any = Qwen3MoeExperts(config).eval()
    for name, parameter in list(experts.named_parameters()):
        weights = torch.empty(parameter.shape, dtype=dtype)
        if huge_pages:
            prefer_huge_pages(weights)
        setattr(experts, name, torch.nn.Parameter(weights.normal_(0, 0.02), requires_grad=False))
    return experts


def run_ours(inputs: Sequence[Any], out: torch.Tensor, layer: LayerKernels, number: int) -> None:
    """A call of round ``number``."""
    rows, slots, weights = inputs[number % N_ROUTINGS]
    layer(rows, slots, weights, out)


def run_theirs(inputs: Sequence[Any], experts: Any, function: Callable[..., object], number: int) -> object:
    """The same for an experts function of transformers."""
    return function(experts, *inputs[number % N_ROUTINGS])


def bench_experts(dtype: torch.dtype, all_rows: Sequence[int], rounds: int, huge_pages: bool) -> list[Row]:
    """The experts kernels, and those of transformers."""
    experts = make_experts(dtype, huge_pages)
    n_experts, hidden, inter = experts.down_proj.shape
    top_k = 8
    tiled = prepare_layer(experts, kernel="tiled")
    grouped = prepare_layer(experts, kernel="grouped")
    reader = Reader(experts.gate_up_proj)
    by_torch, product_flop = product(dtype)
    result = []
    for n_rows in all_rows:
        rows, out = torch.randn(n_rows, hidden).to(dtype), torch.empty(n_rows, hidden)
        slots = [torch.rand(n_rows, n_experts).topk(top_k).indices for _ in range(N_ROUTINGS)]
        weights = torch.rand(n_rows, top_k).to(dtype)

        inputs = [(rows, some, weights) for some in slots]
        ours = partial(run_ours, inputs, out)
        theirs = partial(run_theirs, inputs, experts)

        contestants = [
            Contestant("read", reader),
            by_torch,
            Contestant("tiled", partial(ours, tiled)),
            Contestant("grouped", partial(ours, grouped)),
            Contestant("transformers grouped_mm", partial(theirs, moe.grouped_mm_experts_forward)),
            Contestant("transformers eager", partial(theirs, Qwen3MoeExperts.forward)),
        ]
        if n_rows <= 8:
            # It copies each route's weights: at more rows it needs gigabytes.
            contestants.append(Contestant("transformers batched_mm", partial(theirs, moe.batched_mm_experts_forward)))
        n_rounds = max(LEAST_ROUNDS, min(rounds, rounds * 16 // n_rows))
        spreads = timed(contestants, n_rounds)
        hit = np.mean([slots[number % N_ROUTINGS].unique().numel() for number in range(n_rounds)])
        matrix = 3 * hidden * inter
        n_bytes, n_flop = float(hit) * matrix * dtype.itemsize, 2.0 * n_rows * top_k * matrix
        result += rows_of("experts", dtype, n_rows, spreads, product_flop, n_bytes, n_flop)
    return result


def bench_linear(dtype: torch.dtype, shape: tuple[int, int], all_rows: Sequence[int], rounds: int) -> list[Row]:
    """A linear layer; several copies of its weights take turns, so that none stays in a cache."""
    n_out, n_in = shape
    n_copies = max(2, (256 << 20) // (n_out * n_in * dtype.itemsize))
    copies = torch.empty(n_copies, n_out, n_in, dtype=dtype)
    prefer_huge_pages(copies)
    copies.normal_(0, 0.02)
    reader = Reader(copies)
    by_torch, product_flop = product(dtype)
    result = []
    for n_rows in all_rows:
        if n_rows > MAX_ROWS:
            continue
        x = torch.randn(1, n_rows, n_in).to(dtype)

        def run(function: Any, x: Any = x) -> Any:
            return lambda number: function(x, copies[number % n_copies])

        contestants = [
            Contestant("read", reader),
            by_torch,
            Contestant("few_row_linear", run(few_row_linear)),
            Contestant("torch linear", run(functional.linear)),
        ]
        spreads = timed(contestants, max(LEAST_ROUNDS, rounds))
        n_bytes, n_flop = float(n_out * n_in * dtype.itemsize), 2.0 * n_rows * n_out * n_in
        result += rows_of(f"linear {n_in} -> {n_out}", dtype, n_rows, spreads, product_flop, n_bytes, n_flop)
    return result


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table; limits stand above the kernels they bound."""
    result = Table(title="CPU kernels, one core")
    for name in ("layer", "dtype", "rows", "kernel", "ms [least-most]", "GB/s", "of read", "GFLOP/s", "of product"):
        result.add_column(name, justify="left" if name in {"layer", "dtype", "kernel"} else "right")
    for row in rows:
        is_limit = row.kernel == "limit"
        result.add_row(
            row.layer if is_limit else "",
            row.dtype.removeprefix("torch.") if is_limit else "",
            str(row.rows) if is_limit else "",
            row.kernel,
            "" if is_limit else f"{row.ms:.2f}",
            f"{row.gb_per_s:.1f}",
            "" if is_limit else f"{row.of_read:.0%}",
            f"{row.gflop_per_s:.0f}",
            "" if is_limit else f"{row.of_product:.0%}",
            style="dim" if is_limit else "bold" if row.kernel in {"tiled", "few_row_linear"} else None,
        )
    return result


def main(
    rows: Annotated[str, typer.Option(help="Numbers of rows, comma-separated")] = "1,2,4,8,16,64,256,1024",
    dtypes: Annotated[str, typer.Option(help="Of bf16, f16, f32")] = "bf16,f16,f32",
    rounds: Annotated[int, typer.Option(help="Rounds at few rows, at least 7; fewer at many rows, at least 7")] = 31,
    core: Annotated[int | None, typer.Option(help="Core to run on [default: the host's]")] = None,
    huge_pages: Annotated[bool, typer.Option(help="Ask for huge pages for the weights")] = True,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here")] = None,
) -> None:
    """Measures and prints."""
    os.sched_setaffinity(0, {cores()[0] if core is None else core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    all_rows = [int(number) for number in rows.split(",")]
    result: list[Row] = []
    started = perf_counter()
    with torch.inference_mode():
        for name in dtypes.split(","):
            dtype = DTYPES[name]
            result += bench_experts(dtype, all_rows, rounds, huge_pages)
            for shape in LINEARS:
                result += bench_linear(dtype, shape, all_rows, rounds)
    Console(width=160).print(table(result))
    if json is not None:
        settings = {"rounds": rounds, "huge_pages": huge_pages, "seconds": round(perf_counter() - started)}
        write_json(json, "kernels", settings, result)


if __name__ == "__main__":
    typer.run(main)
