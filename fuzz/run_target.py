"""Fuzzes one parser, guided by coverage: ``python fuzz/run_target.py TARGET [options of libFuzzer]``.

Targets are the files ``parse_*.py`` beside this one; ``all`` takes them in turn in one process. What is found beyond
the seeds goes to ``--found DIR`` (default: nowhere). ``--write-seeds`` writes ``fuzz/corpus`` anew.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
CORPUS = FOLDER / "corpus"
TARGETS = ("requests", "replies", "control", "files", "settings")


def not_instrumented() -> list[str]:
    """Modules that call C, are generated, or tell nothing."""
    found = ["moeoffload.kernels"]
    for folder in ("kernels", "control/v1", "cli"):
        for path in (ROOT / "moeoffload" / folder).glob("*.py"):
            found.append(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    return found


def load(name: str) -> Callable[[bytes], None]:
    """The function of a target; for ``all`` the first byte of an input chooses."""
    if name != "all":
        one_input: Callable[[bytes], None] = importlib.import_module(f"parse_{name}").make()
        return one_input
    functions = [load(each) for each in TARGETS]

    def any_input(data: bytes) -> None:
        if data:
            functions[data[0] % len(functions)](data[1:])

    return any_input


def write_seeds() -> None:
    """One file per seed."""
    for name in TARGETS:
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for seed, data in importlib.import_module(f"parse_{name}").seeds().items():
            (folder / seed).write_bytes(data)


def corpus_of(name: str, to: Path) -> None:
    """Copies the seeds of a target to ``to``; those of ``all`` with the byte that chooses."""
    for number, each in enumerate(TARGETS):
        if name in ("all", each):
            for seed in (CORPUS / each).iterdir():
                choice = bytes([number]) if name == "all" else b""
                (to / f"{each}-{seed.name}").write_bytes(choice + seed.read_bytes())


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=[*TARGETS, "all"], nargs="?", default="all")
    parser.add_argument("--found", type=Path, help="folder for inputs that reach new code; kept and used again")
    parser.add_argument("--write-seeds", action="store_true")
    known, options = parser.parse_known_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
    if known.write_seeds:
        write_seeds()
        return
    try:
        import atheris
    except ImportError as error:
        raise SystemExit(f"atheris is not installed, or has no build for this platform: {error}") from None
    import torch

    torch.set_num_threads(1)
    with atheris.instrument_imports(include=["moeoffload"], exclude=not_instrumented()):
        one_input = load(known.target)
    with tempfile.TemporaryDirectory(prefix="moeoffload-seeds-") as seeds:
        corpus_of(known.target, Path(seeds))
        folders = [str(known.found)] if known.found else []
        atheris.Setup([sys.argv[0], "-max_len=2000", *options, *folders, seeds], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
