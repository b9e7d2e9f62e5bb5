"""Compiles what `TritonExperts` launches for a GPU that need not be here, and says what the programs take of it.

In the folder of the tests, ``python -m gpu_kernels.compile_triton bf16 90`` prints a line per program: registers, bytes
of registers spilt, shared memory, bytes of each asynchronous copy, whether tensor cores are used. Capability 90
is sm_90.
"""

from __future__ import annotations

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
from triton.backends.compiler import GPUTarget

from moeoffload.kernels import triton_ops
from moeoffload.kernels.triton_experts import TritonExperts

from .experts_modules import make_experts

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
PROGRAMS = ("up_program", "down_program", "sum_program")


class OnlyCompiled:
    """Stands for a program: what it would launch is compiled instead, with the same arguments and options."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.compiled: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.compiled = self._program.warmup(*arguments, grid=grid, **options)

        return launch


def compile_all(dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Name and compiled program, for wide and narrow tiles and both layouts of the weights."""
    for kind, n_rows in (("silu", 16), ("silu", 1), ("gpt_oss", 1)):
        experts = TritonExperts(make_experts(kind, n_experts=8, hidden=256, inter=256, dtype=dtype))
        experts._n_processors = 16
        programs = {name: OnlyCompiled(getattr(triton_ops, name)) for name in PROGRAMS}
        experts._ops = SimpleNamespace(**programs)  # type: ignore[assignment]
        rows, slots = torch.zeros(n_rows, 256, dtype=dtype), torch.zeros(n_rows, 4, dtype=torch.int64)
        experts(rows, slots, torch.zeros(n_rows, 4), torch.zeros(n_rows, 256))
        for name, program in programs.items():
            yield f"{name} {kind} of {n_rows} rows", program.compiled


def resources(compiled: Any) -> dict[str, int]:
    """REG per thread, STACK and LOCAL bytes per thread (spilt registers), from the machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def main(dtype: str, capabilities: list[int]) -> None:
    for capability in capabilities:
        target = GPUTarget("cuda", capability, 32)
        current = {"target": target, "device": 0, "stream": 0}
        triton.runtime.driver.set_active(
            SimpleNamespace(**{f"get_current_{name}": lambda *_, value=value: value for name, value in current.items()})
        )
        for name, compiled in compile_all(DTYPES[dtype]):
            used, ptx = resources(compiled), compiled.asm["ptx"]
            copies = sorted({int(size, 0) for size in re.findall(r"cp\.async\.c.*, (0x\w+|\d+), ", ptx)})
            print(f"{name}: {used['REG']} registers, {used['STACK'] + used['LOCAL']} bytes spilt, ", end="")
            print(f"{compiled.metadata.shared} bytes shared, copies of {copies} bytes, tensor cores {'mma.' in ptx}")


if __name__ == "__main__":
    main(sys.argv[1], [int(word) for word in sys.argv[2:]])
