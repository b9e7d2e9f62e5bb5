"""The kernels of one layer on a GPU: bytes of weights and operations per second at 1 to 1024 rows.

``python bench/kernels_cuda.py --json out.json``. Contenders: the Triton programs, grouped products without
waiting (what servers use), and as transformers does them. Every call routes to other experts, so that weights come from
memory, not from its cache. The limit of a call is the larger of two times measured in the same run: reading the weights
of the experts it names at the speed of a copy on the device, and its operations at the speed of one large product.

Without a GPU, ``TRITON_INTERPRET=1 python bench/kernels_cuda.py --device cpu --smoke`` runs tiny shapes through the
interpreter; its times mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.table import Table
from servers import Spread, write_json
from synthetic.configs import geometry_config, tiny_config
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moeoffload.kernels import grouped_experts
from moeoffload.kernels.triton_experts import TritonExperts, why_not_triton

EXPERTS: Final = {
    "qwen3-30b-a3b": Qwen3MoeExperts,
    "mixtral-8x7b": MixtralExperts,
    "gpt-oss-20b": GptOssExperts,
    "olmoe-1b-7b": OlmoeExperts,
}
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
DTYPES: Final = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
ROUTINGS: Final = 16
COPY_BYTES: Final = 1 << 30
PRODUCT_SIZE: Final = 8192

Call = Callable[[int], object]
"""A call with the n-th routing."""


@dataclass(frozen=True)
class Row:
    """One contender at one number of rows.

    ``queued_us`` is per call, of many queued one behind the other, bytes and operations per second are its; ``wall_us``
    is one call from its launch to its result, the host waiting.
    """

    contender: str
    n_rows: int
    queued_us: float
    wall_us: Spread
    gb_per_s: float
    tflop_per_s: float
    limit: str
    limit_us: float
    off_by: float
    """Largest difference to the grouped products as transformers does them, relative to the largest value."""


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._on_gpu = device.type == "cuda"
        self._repeats = repeats

    def wait(self) -> None:
        """For all that was launched."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def queued_us(self, call: Call) -> float:
        """Per call, of a queue of calls."""
        self.wait()
        if not self._on_gpu:
            return self.wall_us(call).median
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(self._repeats):
            call(i % ROUTINGS)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / self._repeats

    def wall_us(self, call: Call) -> Spread:
        """Of single calls."""
        times = []
        for i in range(self._repeats):
            self.wait()
            started = perf_counter()
            call(i % ROUTINGS)
            self.wait()
            times.append((perf_counter() - started) * 1e6)
        return Spread.of(times)


def copy_bytes_per_s(clock: Clock, device: torch.device, n_bytes: int) -> float:
    """Bytes that a copy on the device moves per second: read and written."""
    source = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    clock.wall_us(lambda _: target.copy_(source))
    return 2e6 * n_bytes / clock.queued_us(lambda _: target.copy_(source))


def product_flop_per_s(clock: Clock, device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations per second of one large product."""
    matrix = torch.randn(size, size, dtype=dtype, device=device)
    out = torch.empty_like(matrix)
    clock.wall_us(lambda _: torch.mm(matrix, matrix, out=out))
    return 2e6 * size**3 / clock.queued_us(lambda _: torch.mm(matrix, matrix, out=out))


def make_experts(experts_class: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    with torch.device("meta"):
        experts = experts_class(config).to(dtype)
    experts = experts.to_empty(device=device).requires_grad_(False).eval()
    for parameter in experts.parameters():
        parameter.normal_(std=0.02)
    return experts


class Layer:
    """One layer's experts and routings of ``n_rows`` rows, each row to ``top_k`` different experts."""

    def __init__(self, experts: Any, n_rows: int, top_k: int) -> None:
        self.experts = experts
        down = experts.down_proj
        self.n_experts = down.shape[0]
        self.hidden = down.shape[-1 if experts.is_transposed else -2]
        generator = torch.Generator().manual_seed(n_rows)
        self.rows = torch.randn(n_rows, self.hidden, generator=generator).to(down.device, down.dtype)
        order = torch.rand(ROUTINGS, n_rows, self.n_experts, generator=generator).argsort(dim=2)
        self.slots = order[:, :, :top_k].contiguous()
        self.n_named = sum(len(routing.unique()) for routing in self.slots) / ROUTINGS
        self.slots = self.slots.to(down.device)
        self.weights = torch.full((n_rows, top_k), 1 / top_k, device=down.device)
        self.out = torch.empty(n_rows, self.hidden, device=down.device)
        self.expert_bytes = sum(p[0].numel() * p.element_size() for p in experts.parameters())
        self.flop = 2 * n_rows * top_k * sum(p[0].numel() for p in experts.parameters() if p.dim() == 3)

    def contenders(self, triton: TritonExperts | None) -> dict[str, Call]:
        def grouped(i: int, *, may_wait: bool) -> None:
            out = grouped_experts(self.experts, self.rows, self.slots[i], self.weights, may_wait=may_wait)
            self.out.copy_(out)

        calls: dict[str, Call] = {
            "as transformers": lambda i: grouped(i, may_wait=True),
            "grouped": lambda i: grouped(i, may_wait=False),
        }
        if triton is not None:
            calls["triton"] = lambda i: triton(self.rows, self.slots[i], self.weights, self.out)
        return calls


def main(
    geometry: Annotated[str, typer.Option(help=f"One of {', '.join(EXPERTS)}.")] = "qwen3-30b-a3b",
    dtype: Annotated[str, typer.Option(help="bf16, f16 or f32.")] = "bf16",
    device: Annotated[str, typer.Option(help="cuda, cuda:N or cpu.")] = "cuda",
    repeats: Annotated[int, typer.Option(min=1, help="Calls per figure.")] = 64,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    smoke: Annotated[bool, typer.Option(help="Tiny shapes: whether it runs at all.")] = False,
) -> None:
    """Measures every contender at every number of rows and prints the table."""
    if geometry not in EXPERTS or dtype not in DTYPES:
        raise SystemExit(f"--geometry is one of {', '.join(EXPERTS)}; --dtype is one of {', '.join(DTYPES)}")
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; --device cpu --smoke tries the program without one")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    config = geometry_config(geometry, layers=1)
    if smoke:
        config, repeats = tiny_config(config.model_type), 1
    clock = Clock(where, repeats)
    rows: list[Row] = []
    with torch.inference_mode():
        experts = make_experts(EXPERTS[geometry], config, DTYPES[dtype], where)
        refusal = why_not_triton(experts) if where.type == "cuda" or not smoke else None
        if refusal:
            print(f"the Triton programs do not take part: {refusal}")
        triton = TritonExperts(experts) if refusal is None else None
        bytes_per_s = copy_bytes_per_s(clock, where, 1 << 16 if smoke else COPY_BYTES)
        flop_per_s = product_flop_per_s(clock, where, DTYPES[dtype], 64 if smoke else PRODUCT_SIZE)
        print(
            f"a copy on the device moves {bytes_per_s / 1e9:,.0f} GB/s, a product does {flop_per_s / 1e12:,.0f} TFLOP/s"
        )
        for n_rows in ROWS[:3] if smoke else ROWS:
            layer = Layer(experts, n_rows, config.num_experts_per_tok)
            n_bytes = layer.n_named * layer.expert_bytes
            limits = {"memory": n_bytes / bytes_per_s * 1e6, "operations": layer.flop / flop_per_s * 1e6}
            limit = max(limits, key=limits.__getitem__)
            expected: torch.Tensor | None = None
            for name, call in layer.contenders(triton).items():
                layer.out.fill_(torch.nan)
                call(0)
                if expected is None:
                    expected = layer.out.clone()
                off_by = float((layer.out - expected).abs().max() / expected.abs().max())
                queued_us = clock.queued_us(call)
                rows.append(
                    Row(
                        name,
                        n_rows,
                        queued_us,
                        clock.wall_us(call),
                        n_bytes / queued_us / 1e3,
                        layer.flop / queued_us / 1e6,
                        limit,
                        limits[limit],
                        off_by,
                    )
                )
    Console().print(table_of(rows, f"{geometry}, {dtype}, one layer"))
    if json is not None:
        settings = {"geometry": geometry, "dtype": dtype, "device": device, "repeats": repeats, "smoke": smoke}
        speeds = {"copy_bytes_per_s": bytes_per_s, "product_flop_per_s": flop_per_s}
        write_json(json, "kernels_cuda", settings | speeds, rows)


def table_of(rows: list[Row], title: str) -> Table:
    """A line per contender and number of rows."""
    table = Table(title=title)
    for column in ("rows", "", "queued µs", "wall µs", "GB/s", "TFLOP/s", "limit µs", "of limit", "off by"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        table.add_row(
            str(row.n_rows),
            row.contender,
            f"{row.queued_us:,.1f}",
            f"{row.wall_us.median:,.1f}",
            f"{row.gb_per_s:,.0f}",
            f"{row.tflop_per_s:,.1f}",
            f"{row.limit_us:,.1f} {row.limit}",
            f"{row.limit_us / row.queued_us:.0%}",
            f"{row.off_by:.1e}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
