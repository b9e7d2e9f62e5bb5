"""Pages of measured figures: tables beside the results, one line between its markers, and nothing else changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PLOT = Path(__file__).parents[1] / "bench" / "plot.py"


def test_a_result_gets_its_table_and_its_line(tmp_path: Path) -> None:
    row = {"process": "host", "holds_mib": 1234.4, "limit_mib": 2000.0, "open_mib": 1300.0, "prompt_mib": 1400.0}
    machine = {"cpu": "A CPU", "cores": 2, "torch": "2", "python": "3"}
    result = {"benchmark": "memory", "machine": machine, "settings": {"quick": True}, "rows": [row]}
    (tmp_path / "memory.json").write_text(json.dumps(result))
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "page.md").write_text("# Title\n\n<!-- figure: memory -->Not measured yet.<!-- end -->\n\nThe end.\n")
    # Twice: what was written before is replaced, not added to.
    for _ in range(2):
        command = [sys.executable, str(PLOT), "--markdown", "--results", str(tmp_path), "--docs", str(docs)]
        subprocess.run(command, check=True, capture_output=True)
    table = (tmp_path / "memory.md").read_text()
    assert table.count("| host | 1,234 | 2,000 | 1,300 | 1,400 |") == table.count("A quick run") == 1
    line = "host: **1,400 MiB** (limit 2,000)."
    page = (docs / "page.md").read_text()
    assert page.startswith(f"# Title\n\n<!-- figure: memory -->{line}")
    assert page.endswith("<!-- end -->\n\nThe end.\n")
    assert page.count(line) == page.count("a quick run") == 1
