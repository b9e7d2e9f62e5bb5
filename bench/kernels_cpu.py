"""Speed of the CPU kernels on one core, beside its memory's and torch's limits, and beside transformers.

``python bench/kernels_cpu.py``: one layer of routed experts (Qwen3-30B-A3B: hidden 2048, width 768, 128 experts, top-8)
and two linear layers. Times are this thread's processor time, so that other work on the machine is not counted; kernels
take turns in every round; each call has other routes, so weights come from memory. Limits are measured in the same
rounds: reading is torch's sum of int64 over the same weights, multiplying its product of 1024 x 2048 and 2048 x 1536.

``--formats`` measures packed weights instead, of 64 experts, all beside bfloat16 in every round: normally distributed
weights in the formats of `moeoffload.formats.quantise`, and GGUF's k-quants with random codes.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, write_json
from synthetic import geometry_config
from torch.nn import functional
from transformers.integrations import moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moeoffload import native
from moeoffload.formats.packed import Codes, Offsets, PackedFormat, PackedWeights, Scales
from moeoffload.formats.quantise import FORMATS, quantise
from moeoffload.huge_pages import empty_weights
from moeoffload.kernels import KernelInput, LayerKernels
from moeoffload.kernels.dense import MAX_ROWS, product_if_few

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
LINEARS = ((4096, 2048), (32000, 2048))
READ_BYTES = 64 << 20
PRODUCT = (1024, 2048, 1536)
N_ROUTINGS = 16
LEAST_ROUNDS = 7
PACKED_EXPERTS = 64
_UINT4 = tuple(float(level) for level in range(16))
BFLOAT16 = PackedFormat("bfloat16", Codes.BFLOAT16)
PACKED = FORMATS | {
    "q4_k": PackedFormat("q4_k", Codes.LEVELS4, Scales.SUPER, Offsets.MIN, 32, _UINT4),
    "q5_k": PackedFormat("q5_k", Codes.UINT5, Scales.SUPER, Offsets.MIN, 32),
    "q6_k": PackedFormat("q6_k", Codes.INT6, Scales.SUPER, group=16),
}
Contestants = dict[str, Callable[[int], object]]
"""What is timed, by name: each gets the number of the round."""


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


def limits(weights: torch.Tensor) -> Contestants:
    """Reads the next part of the weights in every round; multiplies two large matrices."""
    parts = weights.view(-1).view(torch.int64).split(READ_BYTES // 8)[:-1]
    depth = PRODUCT[1]
    left, right = (torch.randn(size, depth).to(weights.dtype) for size in (PRODUCT[0], PRODUCT[2]))
    return {
        "read": lambda number: parts[number % len(parts)].sum(),
        "product": lambda _: functional.linear(left, right),
    }


def timed(contestants: Contestants, rounds: int) -> dict[str, Spread]:
    """Milliseconds of processor time by name; in turns."""
    for run in contestants.values():
        run(0)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, run in contestants.items():
            started = thread_time()
            run(number)
            times[name].append((thread_time() - started) * 1e3)
    return {name: Spread.of(values) for name, values in times.items()}


def measure(
    layer: str,
    dtype: torch.dtype,
    n_rows: int,
    contestants: Contestants,
    rounds: int,
    n_bytes: float | dict[str, float],
    n_flop: float,
) -> list[Row]:
    """Rows of one table: the limits first. ``n_bytes`` (of each, or of all) and ``n_flop`` are those of one call."""
    times = timed(contestants, rounds)
    read_rate = READ_BYTES / times.pop("read").median / 1e6
    product_rate = 2 * PRODUCT[0] * PRODUCT[1] * PRODUCT[2] / times.pop("product").median / 1e6
    about = (layer, str(dtype).removeprefix("torch."), n_rows)
    rows = [Row(*about, "limit", Spread(0, 0, 0), read_rate, 1.0, product_rate, 1.0)]
    for name, ms in times.items():
        read_bytes = n_bytes[name] if isinstance(n_bytes, dict) else n_bytes
        read, product = read_bytes / ms.median / 1e6, n_flop / ms.median / 1e6
        rows.append(Row(*about, name, ms, read, read / read_rate, product, product / product_rate))
    return rows


def make_experts(dtype: torch.dtype, n_experts: int | None = None) -> Any:
    """One layer's experts, all or so many, with random weights in huge pages."""
    config = geometry_config("qwen3-30b-a3b", layers=1)
    config.num_experts = n_experts or config.num_experts
    config._experts_implementation = "eager"
    with torch.device("meta"):
        experts: Any = Qwen3MoeExperts(config).eval()
    for name, parameter in list(experts.named_parameters()):
        weights = empty_weights(parameter.shape, dtype)
        setattr(experts, name, torch.nn.Parameter(weights.normal_(0, 0.02), requires_grad=False))
    return experts


def run_ours(layer: LayerKernels, inputs: Sequence[Any], out: torch.Tensor, number: int) -> None:
    """A call of round ``number``."""
    rows, slots, weights = inputs[number % N_ROUTINGS]
    layer(KernelInput(rows, slots, weights, out))


def run_theirs(function: Callable[..., object], experts: Any, inputs: Sequence[Any], number: int) -> object:
    """The same for an experts function of transformers."""
    return function(experts, *inputs[number % N_ROUTINGS])


def bench_experts(dtype: torch.dtype, all_rows: Sequence[int], rounds: int) -> list[Row]:
    """The experts kernels, and those of transformers."""
    experts, top_k = make_experts(dtype), 8
    n_experts, hidden, inter = experts.down_proj.shape
    layers = {"tiled": LayerKernels(experts, kernel="tiled"), "grouped": LayerKernels(experts, kernel="grouped")}
    theirs: dict[str, Any] = {"grouped_mm": moe.grouped_mm_experts_forward, "eager": Qwen3MoeExperts.forward}
    result = []
    for n_rows in all_rows:
        rows, out = torch.randn(n_rows, hidden).to(dtype), torch.empty(n_rows, hidden)
        slots = [torch.rand(n_rows, n_experts).topk(top_k).indices for _ in range(N_ROUTINGS)]
        weights = torch.rand(n_rows, top_k).to(dtype)

        inputs = [(rows, some, weights) for some in slots]
        contestants = limits(experts.gate_up_proj)
        for name, layer in layers.items():
            contestants[name] = partial(run_ours, layer, inputs, out)
        for name, function in theirs.items():
            contestants[f"transformers {name}"] = partial(run_theirs, function, experts, inputs)
        n_rounds = max(LEAST_ROUNDS, min(rounds, rounds * 16 // n_rows))
        hit = statistics.fmean(slots[number % N_ROUTINGS].unique().numel() for number in range(n_rounds))
        matrix = 3 * hidden * inter
        figures = hit * matrix * dtype.itemsize, 2.0 * n_rows * top_k * matrix
        result += measure("experts", dtype, n_rows, contestants, n_rounds, *figures)
    return result


def _packed(form: PackedFormat, n_out: int, n_in: int) -> PackedWeights:
    """The same matrix for each of PACKED_EXPERTS, in huge pages."""
    if form.name in FORMATS:
        one = quantise(torch.randn(1, n_out, n_in) * 0.02, form)[0]
    else:
        one = PackedWeights.empty(form, 1, n_out, n_in, torch.device("cpu"))
        one.data.copy_(torch.randint(0, 256, one.data.shape, dtype=torch.uint8))
        if form.codes is Codes.BFLOAT16:
            one.data.copy_((torch.randn(1, n_out, n_in) * 0.02).to(torch.bfloat16).view(torch.uint8))
        for name in ("factors", "min_factors"):
            if name in form.sections(n_in):
                one.section(name).view(torch.float16).fill_(2.0**-16)
    data = empty_weights((PACKED_EXPERTS, *one.data.shape[1:]), torch.uint8)
    data.copy_(one.data.expand_as(data))
    scales = None if one.scales is None else one.scales.expand(PACKED_EXPERTS, -1, -1).contiguous()
    return PackedWeights(form, n_in, data, scales)


def bench_packed(names: Sequence[str], all_rows: Sequence[int], rounds: int) -> list[Row]:
    """The experts kernels on packed weights; bfloat16 computes."""
    hidden, inter, top_k = 2048, 768, 8
    layers: dict[str, tuple[LayerKernels, float]] = {}
    for form in [BFLOAT16, *(PACKED[name] for name in names)]:
        experts = make_experts(torch.bfloat16, n_experts=1)
        del experts.gate_up_proj, experts.down_proj
        up, down = _packed(form, 2 * inter, hidden), _packed(form, hidden, inter)
        experts.gate_up_proj, experts.down_proj, experts.compute_dtype = (up,), (down,), torch.bfloat16
        layers[form.name] = LayerKernels(experts, kernel="tiled"), (up.nbytes + down.nbytes) / PACKED_EXPERTS
        if form is BFLOAT16:
            weights = up.data.view(torch.bfloat16)
    result = []
    for n_rows in all_rows:
        rows, out = torch.randn(n_rows, hidden).to(torch.bfloat16), torch.empty(n_rows, hidden)
        slots = [torch.rand(n_rows, PACKED_EXPERTS).topk(top_k).indices for _ in range(N_ROUTINGS)]
        inputs = [(rows, some, torch.rand(n_rows, top_k)) for some in slots]
        contestants = limits(weights)
        for name, (layer, _) in layers.items():
            contestants[name] = partial(run_ours, layer, inputs, out)
        n_rounds = max(LEAST_ROUNDS, min(rounds, rounds * 16 // n_rows))
        hit = statistics.fmean(slots[number % N_ROUTINGS].unique().numel() for number in range(n_rounds))
        n_bytes = {name: hit * each for name, (_, each) in layers.items()}
        n_flop = 2.0 * n_rows * top_k * 3 * hidden * inter
        result += measure("packed experts", torch.bfloat16, n_rows, contestants, n_rounds, n_bytes, n_flop)
    return result


def bench_linear(dtype: torch.dtype, shape: tuple[int, int], all_rows: Sequence[int], rounds: int) -> list[Row]:
    """A linear layer; several copies of its weights take turns, so that none stays in a cache."""
    n_out, n_in = shape
    n_copies = max(2, (256 << 20) // (n_out * n_in * dtype.itemsize))
    copies = empty_weights((n_copies, n_out, n_in), dtype)
    copies.normal_(0, 0.02)

    def call(function: Any, x: torch.Tensor, number: int) -> object:
        return function(x, copies[number % n_copies])

    result = []
    for n_rows in (n for n in all_rows if n <= MAX_ROWS):
        x = torch.randn(1, n_rows, n_in).to(dtype)
        contestants = limits(copies)
        for name, function in (("few_row_linear", product_if_few), ("torch", functional.linear)):
            contestants[name] = partial(call, function, x)
        figures = float(n_out * n_in * dtype.itemsize), 2.0 * n_rows * n_out * n_in
        result += measure(f"linear {n_in} -> {n_out}", dtype, n_rows, contestants, max(LEAST_ROUNDS, rounds), *figures)
    return result


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table; limits stand above the kernels they bound."""
    result = Table(title="CPU kernels, one core")
    for name in ("layer", "dtype", "rows", "kernel", "ms [least-most]", "GB/s", "of read", "GFLOP/s", "of product"):
        result.add_column(name, justify="left" if name in {"layer", "dtype", "kernel"} else "right")
    for row in rows:
        is_limit = row.kernel == "limit"
        about = (row.layer, row.dtype, str(row.rows)) if is_limit else ("", "", "")
        ms, *shares = ("", "", "") if is_limit else (f"{row.ms:.2f}", f"{row.of_read:.0%}", f"{row.of_product:.0%}")
        style = "dim" if is_limit else "bold" if row.kernel in {"tiled", "few_row_linear", *PACKED} else None
        rates = f"{row.gb_per_s:.1f}", shares[0], f"{row.gflop_per_s:.0f}", shares[1]
        result.add_row(*about, row.kernel, ms, *rates, style=style)
    return result


def main(
    rows: Annotated[str, typer.Option(help="Numbers of rows, comma-separated")] = "1,2,4,8,16,64,256,1024",
    dtypes: Annotated[str, typer.Option(help="Of bf16, f16, f32")] = "bf16,f16,f32",
    formats: Annotated[str, typer.Option(help="Packed weights instead, of int8,fp8,int4,mxfp4,q4_k,q5_k,q6_k")] = "",
    rounds: Annotated[int, typer.Option(help="Rounds at few rows, at least 7; fewer at many rows, at least 7")] = 31,
    core: Annotated[int | None, typer.Option(help="Core to run on [default: the host's]")] = None,
    matrix_unit: Annotated[bool, typer.Option(help="Use the CPU's matrix unit if it has one")] = True,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here")] = None,
) -> None:
    """Measures and prints."""
    os.sched_setaffinity(0, {cores()[0] if core is None else core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    features = native.cpu_features() & ~(native.Features(0) if matrix_unit else native.Features.MATRIX_UNIT)
    native.cpu_features = lambda: features  # type: ignore[assignment]
    all_rows = [int(number) for number in rows.split(",")]
    result: list[Row] = []
    started = perf_counter()
    with torch.inference_mode():
        if formats:
            result += bench_packed(formats.split(","), all_rows, rounds)
        for dtype in (DTYPES[name] for name in ([] if formats else dtypes.split(","))):
            result += bench_experts(dtype, all_rows, rounds)
            for shape in LINEARS:
                result += bench_linear(dtype, shape, all_rows, rounds)
    Console(width=160).print(table(result))
    if json is not None:
        settings = {"rounds": rounds, "features": str(features), "seconds": round(perf_counter() - started)}
        write_json(json, "kernels", settings, result)


if __name__ == "__main__":
    typer.run(main)
