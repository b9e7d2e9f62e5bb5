"""The demo model in packed formats answers with the tokens of transformers on the weights that a library unpacked.

``bench/formats_parity.py`` is the same for every format and 64 prompts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tasks
from formats_parity import measure


@pytest.mark.parametrize("name", ["fp8", "awq", "Q4_K", "MXFP4"])
def test_answers_are_those_of_the_unpacked_model(name: str, three_servers: list[str], tmp_path: Path) -> None:
    for row in measure(name, tasks.prompts(8, seed=11), three_servers[:2], tmp_path):
        assert not row.differing
        assert row.right_percent == 100
