"""Makes the Python code of the control plane; run it after a change of the proto file: ``make proto``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

PROTO_FILE = Path(__file__).parent / "moeoffload" / "v1" / "expert_service.proto"
OUTPUT = Path(__file__).parents[1] / "moeoffload" / "control" / "v1"


def generate(output: Path) -> None:
    """Writes ``expert_service_pb2.py``, its stub and its gRPC part into the folder ``output``.

    Raises:
        RuntimeError: if protoc refuses the file.
    """
    from grpc_tools import protoc

    # The file is given relative to its own folder, so that generated modules are importable from any package.
    arguments = ["protoc", f"-I{PROTO_FILE.parent}", f"--python_out={output}", f"--pyi_out={output}"]
    if protoc.main([*arguments, f"--grpc_python_out={output}", PROTO_FILE.name]) != 0:
        raise RuntimeError(f"protoc refused {PROTO_FILE}")
    stub = output / "expert_service_pb2_grpc.py"
    absolute = re.compile(r"^import expert_service_pb2 as", re.MULTILINE)
    stub.write_text(absolute.sub("from moeoffload.control.v1 import expert_service_pb2 as", stub.read_text()))


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
