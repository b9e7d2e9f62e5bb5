"""Compiles what `TritonExperts` launches for GPUs that need not be here, and says what the programs take of them.

In the folder of the tests, ``python -m gpu_kernels.compile_triton bf16 90`` prints a line per program: registers, bytes
of registers spilt, shared memory, bytes of each asynchronous copy, whether tensor cores are used. Capability 90
is sm_90; one that follows ``-`` compiles only some of the programs (``bf16 90 - 86 89``).
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from experts_modules import BY_NAME, make_experts, make_packed
from triton.backends.compiler import GPUTarget

from moeoffload.kernels import triton_ops
from moeoffload.kernels.triton_experts import TritonExperts

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
LAUNCHES = ("up", "down", "sum")
PLAIN = (("silu", 16), ("silu", 1), ("gpt_oss", 1), ("silu", 40))
PACKED = ("fp8 blocks", "int8 BF16 0", "mxfp4", "int4 F16 128 ZERO", "iq4_xs", "q4_k", "q5_k", "q6_k")
WIDTH = 2304
"""Of rows. A whole number of groups of all kinds, but rows of Q6_K begin at multiples of 4 bytes only."""


class OnlyCompiled:
    """Stands for a program: notes what would be launched, for compiling it with the same arguments and options."""

    def __init__(self, program: Any, launches: list[Callable[[], Any]]) -> None:
        self._program, self._launches = program, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self._launches.append(functools.partial(self._program.warmup, *arguments, grid=grid, **options))

        return launch


def compile_all(dtype: torch.dtype, *, only_some: bool) -> Iterator[tuple[str, Any]]:
    """Name and compiled program, for few and many rows, wide and narrow tiles, and all layouts of the weights."""
    for kind, n_rows in PLAIN[-1:] if only_some else PLAIN:
        experts = TritonExperts(make_experts(kind, n_experts=8, hidden=256, inter=256, dtype=dtype))
        yield from _compiled(experts, n_rows, f"{kind} of {n_rows} rows", LAUNCHES)
    for name in ("fp8 blocks", "q4_k") if only_some else PACKED:
        packed, _ = make_packed("silu", (BY_NAME[name],), (1, WIDTH, WIDTH), dtype)
        yield from _compiled(TritonExperts(packed), 16, name, LAUNCHES[1:2])
        if name == "q4_k":
            yield from _compiled(TritonExperts(packed), 40, "q4_k of 40 rows", LAUNCHES[:1])


def _compiled(experts: TritonExperts, n_rows: int, name: str, wanted: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    experts._n_processors = 16
    launches: list[Callable[[], Any]] = []
    experts._ops = SimpleNamespace(  # type: ignore[assignment]
        projection_program=OnlyCompiled(triton_ops.projection_program, launches),
        sum_program=OnlyCompiled(triton_ops.sum_program, launches),
    )
    rows, slots = torch.zeros(n_rows, experts.hidden, dtype=experts.dtype), torch.zeros(n_rows, 4, dtype=torch.int64)
    experts(rows, slots, torch.zeros(n_rows, 4), torch.zeros(n_rows, experts.hidden))
    for launched, compile_it in zip(LAUNCHES, launches, strict=True):
        if launched in wanted:
            yield f"{launched}_program {name}", compile_it()


def resources(compiled: Any) -> dict[str, int]:
    """REG per thread, STACK and LOCAL bytes per thread (spilt registers), from the machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def main(dtype: str, capability: int, *, only_some: bool) -> None:
    target = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: capability,  # what is compiled is kept by device
            get_current_stream=lambda device: 0,
        )
    )
    for name, compiled in compile_all(DTYPES[dtype], only_some=only_some):
        used, ptx = resources(compiled), compiled.asm["ptx"]
        copies = sorted({int(size, 0) for size in re.findall(r"cp\.async\.c.*, (0x\w+|\d+), ", ptx)})
        print(f"sm_{capability} {name}: {used['REG']} registers, {used['STACK'] + used['LOCAL']} bytes spilt, ", end="")
        print(f"{compiled.metadata.shared} bytes shared, copies of {copies} bytes, tensor cores {'mma.' in ptx}")


if __name__ == "__main__":
    for index, capability in enumerate(sys.argv[2:], 2):
        if capability != "-":
            main(sys.argv[1], int(capability), only_some="-" in sys.argv[:index])
