"""What tests of the HTTP server share."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import DEMO


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The demo checkpoint's: one token for each byte, 256 ends an answer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)
