"""Pages of measured figures: tables beside the results, one line between its markers, and nothing else changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PLOT = Path(__file__).parents[1] / "bench" / "plot.py"
PAGE = "# Title\n\n<!-- figure: {name} -->Not measured yet.<!-- end -->\n\nThe end.\n"


def plot(tmp_path: Path, name: str, result: dict[str, Any]) -> tuple[str, str]:
    """The page of the result, and a page of the documentation that quotes it."""
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir(exist_ok=True)
    docs.mkdir(exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(result))
    (docs / "page.md").write_text(PAGE.format(name=name))
    # Twice: what was written before is replaced, not added to.
    for _ in range(2):
        command = [sys.executable, str(PLOT), "--markdown", "--results", str(results), "--docs", str(docs)]
        subprocess.run(command, check=True, capture_output=True)
    return (results / f"{name}.md").read_text(), (docs / "page.md").read_text()


def result(benchmark: str, row: dict[str, Any], **settings: Any) -> dict[str, Any]:
    machine = {"cpu": "A CPU", "cores": 2, "torch": "2", "python": "3"}
    return {"benchmark": benchmark, "machine": machine, "settings": settings, "rows": [row]}


def test_a_result_gets_its_table_and_its_line(tmp_path: Path) -> None:
    row = {"process": "host", "holds_mib": 1234.4, "limit_mib": 2000.0, "open_mib": 1300.0, "prompt_mib": 1400.0}
    table, page = plot(tmp_path, "memory", result("memory", row))
    assert table.count("| host | 1,234 | 2,000 | 1,300 | 1,400 |") == 1
    line = "host: **1,400 MiB** (limit 2,000). *A CPU, 2 cores.*"
    assert page == f"# Title\n\n<!-- figure: memory -->{line}<!-- end -->\n\nThe end.\n"


def test_a_benchmark_without_columns_gets_its_fields(tmp_path: Path) -> None:
    row = {"way": "served", "task": "decode", "speed": {"median": 2.0, "low": 1.0, "high": 3.0}, "missing": None}
    table, page = plot(tmp_path, "against", result("against", row, quick=False))
    assert "| way | task | speed | missing |" in table
    assert "| served | decode | 2.00 (1.00–3.00) | – |" in table
    assert "decode, served: **2.000 (1.000–3.000)**" in page


def test_a_quick_run_and_unequal_kernels_are_marked(tmp_path: Path) -> None:
    row = {"way": "served", "task": "decode", "speed": {"median": 2.0, "low": 1.0, "high": 3.0}}
    table, page = plot(tmp_path, "against", result("against", row, quick=True, same_kernels=False))
    assert "A quick run" in table
    assert "different kernels" in table
    assert "a quick run" in page
