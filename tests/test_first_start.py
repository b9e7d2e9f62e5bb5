"""The first start on a machine: kernels are compiled while experts are loaded, not while a host waits for seconds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from command_lines import Commands
from conftest import DEMO, ROOT, StartServer

from moeoffload import open_model

COMPILED = re.compile(r"compiled (\w+) in")


def test_nothing_is_compiled_between_loading_and_the_first_request(start_server: StartServer, tmp_path: Path) -> None:
    copy = tmp_path / "moeoffload"
    shutil.copytree(ROOT / "moeoffload", copy)
    # The large program stays, if it is there: it is compiled with the first layer, and takes half a minute.
    for kept in (copy / "kernels" / "__pycache__").glob("*.nbi"):
        if not kept.name.startswith(("program.", "watch.", "lane_program.")):
            kept.unlink()
    server = start_server("--log-level", "info", patch=f"import sys; sys.path.insert(0, {str(tmp_path)!r})", warm=False)
    for transport in ("shared", "stream"):
        with open_model(DEMO, experts=[server.address], transport=transport, device="cpu"):
            pass
    loading, *waiting = server.log_text.split("loaded in")
    assert {"answer", "turnaround", "lane_turnaround", "unpack", "encode"} <= set(COMPILED.findall(loading))
    assert ["attached over" in each for each in waiting] == [True, True]
    assert not COMPILED.findall("".join(waiting))


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
