"""The rooms of the house: a module imports only from lower floors, and the two big rooms never know each other."""

from __future__ import annotations

import ast
import socket
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from command_lines import run_python

from moeoffload.native import has_gpu_driver

PACKAGE = Path(__file__).parents[1] / "moeoffload"
FLOORS = {
    "cli": 6, "serve": 5, "host": 4, "expert_server": 4, "transport": 3, "control": 3, "kernels": 2, "checkpoint": 2,
    "wire": 2,
}  # fmt: skip


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module below the package; files of the package itself are floor 1."""
    return parts[0] if parts and parts[0] in FLOORS else ""


def imports_of(path: Path) -> set[tuple[str, ...]]:
    """Modules of this package that a file imports while it is loaded or later, below the package."""
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found.update(tuple(name.split(".")[1:]) for name in names if name.split(".")[0] == "moeoffload")
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_climbs_a_floor(path: Path) -> None:
    room = room_of(path.relative_to(PACKAGE).parts)
    for imported in imports_of(path):
        other = room_of(imported)
        lower = FLOORS.get(other, 1) < FLOORS.get(room, 1)
        assert other == room or lower, f"{path.name} (floor {FLOORS.get(room, 1)}) imports {'.'.join(imported)}"


def test_modules_form_no_circle() -> None:
    # What a package's ``__init__`` re-exports is imported by everybody, so only plain modules count.
    modules = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in FILES if path.name != "__init__.py"}
    graph = {
        name: {target for imported in imports_of(path) for target in (imported, imported[:-1]) if target in modules}
        - {name}
        for name, path in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


# By the names they are imported by. Each one costs every start time and memory: add one only if it is worth that.
OF_A_SERVER = {
    "annotated_doc", "annotated_types", "dotenv", "google", "grpc", "grpc_health", "grpc_reflection", "grpc_tools",
    "moeoffload", "numpy", "posix_ipc", "psutil", "pydantic", "pydantic_core", "pydantic_settings", "shellingham",
    "torch", "torchgen", "tqdm", "typer", "typing_extensions", "typing_inspection", "zmq",
}  # fmt: skip
OF_A_HOST = OF_A_SERVER | {
    "PIL", "anyio", "filelock", "h11", "httpcore2", "httpx2", "huggingface_hub", "idna",
    "jinja2", "markupsafe", "mpmath", "packaging", "regex", "rich", "safetensors", "sniffio", "sympy", "tokenizers",
    "transformers", "truststore", "yaml",
}  # fmt: skip
IMPORTED = """
import sys
from importlib.metadata import packages_distributions
before = set(sys.modules)  # what Python itself is set to import is not ours
{code}
found = {{name for name, module in sys.modules.items() if module is not None}} - before
installed = packages_distributions()
print(*sorted(name for name in found if name.split('.')[0] in installed))
"""


def imported_by(code: str) -> tuple[set[str], set[str]]:
    """The installed packages that ``code`` imports, outside the standard library, and all modules in them."""
    modules = set(run_python(IMPORTED.format(code=code), TRITON_INTERPRET=None).out.split())
    packages = {name.split(".")[0] for name in modules} - sys.stdlib_module_names
    assert "torch" in packages
    return packages, modules


def test_a_server_that_starts_imports_only_these_packages_and_no_compiler() -> None:
    code = "from moeoffload.cli import expert_app; from moeoffload.expert_server import server"
    packages, modules = imported_by(code)
    assert packages <= OF_A_SERVER
    assert "torch._dynamo" not in modules


def test_a_host_that_starts_imports_only_these_packages() -> None:
    code = (
        "from moeoffload.cli import host_app, imports; imports.skip_triton_without_gpu(); "
        "from moeoffload.host import generate, session"
    )
    packages, _ = imported_by(code)
    assert packages <= OF_A_HOST | ({"triton"} if has_gpu_driver() else set())


def test_a_name_that_is_no_model_is_refused_before_torch_is_imported() -> None:
    code = (
        "import sys; from moeoffload.cli import entry\ntry: entry.moeoffload()\nfinally: print('torch' in sys.modules)"
    )
    for name, reason in (("/nowhere", "no such folder"), ("nowhere.gguf", "no such file"), ("a b", "not a hub id")):
        done = run_python(code, "run", name, "--prompt", "hi")
        assert (done.code, done.out) == (3, "False\n"), done.err
        assert reason in done.err


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"HF_HUB_ETAG_TIMEOUT": "1"}, "the hub cannot be reached within 1 s"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ],
    ids=["silent hub", "offline"],
)
@pytest.mark.parametrize("program", ["moeoffload run", "moeoffload_expert --model"])
def test_a_hub_id_that_cannot_be_had_is_refused_before_torch_is_imported(
    program: str, variables: dict[str, str], reason: str
) -> None:
    name, *words = program.split()
    code = f"import sys; from moeoffload.cli import entry\ntry: entry.{name}()\nfinally: print('torch' in sys.modules)"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "NO_PROXY": "127.0.0.1"}
        more = ["--prompt", "hi"] if name == "moeoffload" else ["--listen", "127.0.0.1:0"]
        done = run_python(code, *words, "no-such-org/no-model", *more, **hub | variables)
    assert (done.code, done.out) == (3, "False\n"), done.err
    (line,) = (line for line in done.err.splitlines() if " INFO moeoffload." not in line)
    assert line.startswith("error: no-such-org/no-model: no such folder, not in the local hub cache, and ")
    assert reason in line
