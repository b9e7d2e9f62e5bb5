"""Results of the benchmarks of faults as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from servers import machine


def write_results(
    path: Path, benchmark: str, settings: dict[str, Any], figures: dict[str, Any], rows: Sequence[Any]
) -> None:
    """Writes settings, what was found and the single ``rows`` (dataclasses), with the machine it ran on."""
    data = {
        "benchmark": benchmark,
        "machine": machine(),
        "settings": settings,
        "figures": figures,
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n")
