"""The page of measured figures: results go between their markers, and nothing else changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PLOT = Path(__file__).parents[1] / "bench" / "plot.py"
PAGE = "# Title\n\n<!-- measured: {name} -->\nNot measured yet.\n<!-- end: {name} -->\n\nThe end.\n"


def plot(tmp_path: Path, name: str, result: dict[str, Any]) -> str:
    results = tmp_path / "results"
    results.mkdir(exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(result))
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(name=name))
    # Twice: what was written before is replaced, not added to.
    for _ in range(2):
        command = [sys.executable, str(PLOT), "--markdown", "--results", str(results), "--page", str(page)]
        subprocess.run(command, check=True, capture_output=True)
    return page.read_text()


def result(benchmark: str, row: dict[str, Any], **settings: Any) -> dict[str, Any]:
    machine = {"cpu": "A CPU", "cores": 2, "torch": "2", "python": "3"}
    return {"benchmark": benchmark, "machine": machine, "settings": settings, "rows": [row]}


def test_a_known_benchmark_gets_its_columns(tmp_path: Path) -> None:
    row = {"process": "host", "holds_mib": 1234.4, "limit_mib": 2000.0, "open_mib": 1300.0, "prompt_mib": 1400.0}
    page = plot(tmp_path, "memory", result("memory", row))
    assert page.count("| host | 1,234 | 2,000 | 1,300 | 1,400 |") == 1
    assert page.startswith("# Title\n")
    assert page.endswith("<!-- end: memory -->\n\nThe end.\n")
    assert "Not measured yet" not in page


def test_an_unknown_benchmark_gets_its_fields(tmp_path: Path) -> None:
    row = {"what": "x", "seconds": {"median": 2.0, "low": 1.0, "high": 3.0}, "missing": None}
    page = plot(tmp_path, "other", result("other", row, quick=False))
    assert "| what | seconds | missing |" in page
    assert "| x | 2.00 (1.00–3.00) | – |" in page


def test_a_quick_run_and_unequal_kernels_are_marked(tmp_path: Path) -> None:
    page = plot(tmp_path, "other", result("other", {"what": "x"}, quick=True, same_kernels=False))
    assert "A quick run" in page
    assert "different kernels" in page
