"""The first start on a machine: kernels are compiled while experts are loaded, not while a host waits for seconds."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

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
    server = start_server("--log-level", "info", patch=f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    for transport in ("shared", "stream"):
        with open_model(DEMO, experts=[server.address], transport=transport, device="cpu"):
            pass
    loading, *waiting = server.log_text.split("loaded in")
    assert {"answer", "turnaround", "lane_turnaround", "unpack", "encode"} <= set(COMPILED.findall(loading))
    assert ["attached over" in each for each in waiting] == [True, True]
    assert not COMPILED.findall("".join(waiting))
