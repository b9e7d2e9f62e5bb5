"""Compiles the Triton programs for a GPU that need not be here, and says what they take of it.

``python tests/kernels/compile_triton.py 90 bf16`` prints a line per program: registers, bytes of registers spilt to
memory, shared memory, bytes of each asynchronous copy, whether tensor cores are used.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moeoffload.kernels import triton_ops

TYPES = {"f32": "*fp32", "f16": "*fp16", "bf16": "*bf16"}
STEP_BYTES, STAGES, WARPS = 256, 4, 4


def variants() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, program, and everything that is not an int argument: pointer types and constants."""
    for dtype, pointer in TYPES.items():
        for kind, n_columns in (("silu", 64), ("silu", 16), ("clamped_swiglu", 64)):
            is_gpt_oss = kind == "clamped_swiglu"
            depth = STEP_BYTES // (4 if dtype == "f32" else 2) // (2 if is_gpt_oss else 1)
            stride = {"stride_out": 1} if is_gpt_oss else {"stride_in": 1}
            common = stride | {"top_k_padded": 8, "n_columns": n_columns, "depth": depth, "has_bias": is_gpt_oss}
            pointers = {"slots": "*i64", "weight": pointer, "bias": pointer, "activated": pointer}
            floats = {"limit": "fp32", "alpha": "fp32"}
            up = {"function": kind, "is_gated": True, "is_interleaved": is_gpt_oss, "rows": pointer}
            yield f"up {kind} {n_columns} {dtype}", triton_ops.up_program, pointers | floats | common | up
            down = {"down": pointer}
            yield f"down {kind} {n_columns} {dtype}", triton_ops.down_program, pointers | common | down
        call = {"down": pointer, "slots": "*i64", "weights": "*fp32", "out": "*fp32"}
        yield f"sum {dtype}", triton_ops.sum_program, call | {"top_k_padded": 8, "n_columns": 256}


def compile_program(program: Any, known: dict[str, Any], capability: int) -> Any:
    """As a launch with sizes and addresses divisible by 16 does."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(program.params):
        value = known.get(parameter.name, "i32")
        if not isinstance(value, str) or parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = value
        if value.startswith("*") or (value == "i32" and parameter.name not in ("n_rows", "top_k")):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(program, signature, constants, attributes)
    options = {"num_warps": WARPS, "num_stages": STAGES}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(compiled: Any) -> dict[str, int]:
    """REG per thread, STACK and LOCAL bytes per thread (spilt registers), from the machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def main(capability: int, only: str = "") -> None:
    for name, program, known in variants():
        if not name.endswith(only):
            continue
        compiled = compile_program(program, known, capability)
        used, ptx = resources(compiled), compiled.asm["ptx"]
        copies = sorted({int(size, 0) for size in re.findall(r"cp\.async\.c.*, (0x\w+|\d+), ", ptx)})
        print(f"{name}: {used['REG']} registers, {used['STACK'] + used['LOCAL']} bytes spilt, ", end="")
        print(f"{compiled.metadata.shared} bytes shared, copies of {copies} bytes, tensor cores {'mma.' in ptx}")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
