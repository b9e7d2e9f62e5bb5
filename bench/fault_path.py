"""Makes ``fault_kit``, which the tests have, importable for benchmarks, and the demo's tasks with it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
for folder in (ROOT, ROOT / "tests", ROOT / "tests" / "faults", ROOT / "examples" / "demo"):
    sys.path.insert(0, str(folder))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
