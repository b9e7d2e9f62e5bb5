"""Results of the benchmarks of faults as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from servers import machine


def write_results(
    path: Path,
    benchmark: str,
    settings: dict[str, Any],
    rows: Sequence[Any],
    figures: dict[str, Any],
    runs: Sequence[Any],
) -> None:
    """Writes ``rows`` (dataclasses) for a table, totals, and the single ``runs`` (dataclasses) behind them."""
    data = {
        "benchmark": benchmark,
        "machine": machine(),
        "settings": settings,
        "rows": [asdict(row) for row in rows],
        "figures": figures,
        "runs": [asdict(run) for run in runs],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n")
