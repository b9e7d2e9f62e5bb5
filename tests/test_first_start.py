"""The first start on a machine: what was compiled ahead is not compiled again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from command_lines import Commands
from conftest import DEMO, ROOT, StartServer

COMPILED = re.compile(r"compiled (\w+) in")


def test_what_was_compiled_ahead_is_all_there_is_to_compile(start_server: StartServer, commands: Commands) -> None:
    ahead = [sys.executable, "-m", "moeoffload.kernels.ahead"]
    done = subprocess.run(ahead, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
    assert re.search(r"\d+ programs are in /", done.stderr)
    server = start_server("--log-level", "info", warm=False)
    options = ["--device", "cpu", "--experts", server.address, "--log-level", "info", "--prompt", "3 + 4 ="]
    for payload, transport in (("bf16", "shared"), ("f16", "stream")):
        ran = commands.run("moeoffload", "run", DEMO, *options, "--dtype", payload, "--transport", transport)
        assert ran.code == 0, ran.err
        assert COMPILED.findall(ran.err) == []
    assert COMPILED.findall(server.log_text) == []


def test_compiling_ahead_needs_a_folder_to_write() -> None:
    environment = os.environ | {"NUMBA_CACHE_LOCATOR_CLASSES": "ZipCacheLocator"}
    ahead = [sys.executable, "-m", "moeoffload.kernels.ahead"]
    done = subprocess.run(ahead, cwd=ROOT, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch("error: .* set NUMBA_CACHE_DIR to one\n", done.stderr)


def test_no_two_programs_share_a_file_of_the_cache(tmp_path: Path) -> None:
    code = """
import torch
from moeoffload.kernels.pack import convert_program
for source in (torch.bfloat16, torch.float16):
    convert_program(source, torch.float32)
"""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=200, check=True)
    indices = list(tmp_path.rglob("*.nbi"))
    codes = sorted(path.name for path in tmp_path.rglob("*.nbc"))
    assert len(indices) == 2
    assert codes == sorted(path.name.replace(".nbi", ".1.nbc") for path in indices)
